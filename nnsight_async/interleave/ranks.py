"""What the ranks of a tensor-parallel group say to one another about blocks: the first leads, the others follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch

from nnsight_async.interleave.layouts import Place, mapped
from nnsight_async.interleave.locations import Location
from nnsight_async.interleave.rows import Batch, Path, Slab


class Ranks(Protocol):
    """The group as one of its ranks sees it. All of them are at the same place in the forward pass when they talk."""

    rank: int
    size: int

    def tell(self, message: object) -> None:
        """Say something to the others; the first rank only."""
        ...

    def hear(self) -> Any:
        """What the first rank says next."""
        ...

    def send(self, tensor: torch.Tensor) -> None:
        """Give a tensor to the others; the first rank only."""
        ...

    def receive(self, kind: Kind) -> torch.Tensor:
        """What the first rank gives."""
        ...

    def part(self) -> None:
        """Code of blocks runs, on this rank alone: what all ranks would have to come to raises from now on."""
        ...

    def meet(self) -> None:
        """The ranks are together again."""
        ...

    def gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """The tensors of all ranks, which have one shape. The others than the first get none."""
        ...

    def agree(self, failure: str | None) -> Sequence[str | None]:
        """What went wrong on each rank, known to all."""
        ...


class Kind(NamedTuple):
    """What a tensor is that will be sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Kind:
        return cls(tuple(tensor.shape), tensor.dtype)


class Write(NamedTuple):
    """Whole rows, written from row `start` on to the tensor at `path`."""

    path: Path
    start: int
    rows: torch.Tensor
    in_place: bool


class Announced(NamedTuple):
    """A `Write` of which the rows come next."""

    path: Path
    start: int
    kind: Kind
    in_place: bool


class State(NamedTuple):
    """What the others have to know of a run, which goes by key and part."""

    key: int
    part: int
    over: bool
    remembered: bool
    stopped: bool
    wrote: bool


Change = Literal["want", "drop", "watch", "rest"]
"""What becomes of an event (see `Waiting` and `Sites`)."""


class Turn(NamedTuple):
    """Blocks have had their turns, and this is what has changed."""

    waits: list[tuple[Change, Location]]
    states: list[State]
    writes: list[Announced]


class Apply(NamedTuple):
    """A block applies a module: its arguments, in which numbered places stand for tensors of these kinds."""

    path: str
    method: str
    arguments: tuple[Any, ...]
    tensors: list[Kind]


def gathered(value: Any, place: Place, ranks: Ranks) -> Any:
    """The whole value on the first rank; anything on the others."""

    def whole(tensor: torch.Tensor, layout: Any) -> Any:
        parts = ranks.gather(tensor)
        return layout.whole(parts) if parts else tensor

    return mapped(value, place, whole) if place else value


def written(value: Any, event: Location, batch: Batch, writes: Sequence[Write], place: Place, ranks: Ranks) -> Any:
    """This rank's value with its part of the writes in it."""
    if not writes or value is None:
        return value
    slab = Slab(value, batch, event, ())
    for path, start, rows, in_place in writes:
        layout = place.get(path)
        mine = rows if layout is None else layout.part(rows, ranks.rank, ranks.size)
        slab.put(start, [(path, mine)], in_place=in_place)
    return slab.finish()
