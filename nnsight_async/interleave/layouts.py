"""How the tensors of the ranks of a tensor-parallel group make up whole ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from nnsight_async.interleave.locations import Location
from nnsight_async.interleave.rows import Path, exchanged, part


class Layout(Protocol):
    """What each rank has of a tensor."""

    def whole(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole tensor, from those of all ranks in their order."""
        ...

    def part(self, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        """That of one rank."""
        ...


@dataclass(frozen=True, slots=True)
class Pieces:
    """Each rank has a piece of each of several tensors, one behind the other: of q, k and v, or of gate and up.

    `dim` is counted from the end, `sizes` are those of one rank's pieces, and `copies` says of each how many ranks in
    a row have the same one (keys and values, where there are more ranks than heads of them).
    """

    dim: int
    sizes: tuple[int, ...]
    copies: tuple[int, ...]

    @classmethod
    def even(cls, dim: int, size: int, copies: int = 1) -> Pieces:
        """Of one tensor that is cut once."""
        return cls(dim, (size,), (copies,))

    def whole(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        cut = [part.split(self.sizes, self.dim) for part in parts]
        chosen = [
            cut[rank][number] for number, copies in enumerate(self.copies) for rank in range(0, len(parts), copies)
        ]
        return torch.cat(chosen, self.dim)

    def part(self, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        pieces: list[torch.Tensor] = []
        offset = 0
        for size, copies in zip(self.sizes, self.copies, strict=True):
            pieces.append(whole.narrow(self.dim, offset + rank // copies * size, size))
            offset += ranks // copies * size
        return torch.cat(pieces, self.dim)


@dataclass(frozen=True, slots=True)
class Sum:
    """The whole tensor is the sum of those of the ranks, which are added later. What is written becomes the first's."""

    def whole(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(tuple(parts)).sum(0)

    def part(self, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        return whole if rank == 0 else torch.zeros_like(whole)


@dataclass(frozen=True, slots=True)
class Unknown:
    """The ranks have different tensors, and no rule says how they belong together."""

    def whole(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        raise NotImplementedError

    def part(self, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        raise NotImplementedError


Place = Mapping[Path, Layout]
"""The layouts of the tensors in a value that are not the same on every rank, by their paths."""

WHOLE: Place = {}


def mapped(value: Any, place: Place, change: Callable[[torch.Tensor, Layout], Any]) -> Any:
    """`value` with the tensors at the paths of `place` changed. What is not there is not there on any rank."""
    for path, layout in place.items():
        tensor = _found(value, path)
        if isinstance(tensor, torch.Tensor):
            value = _replaced(value, path, change(tensor, layout))
    return value


def _replaced(value: Any, path: Path, tensor: Any) -> Any:
    return exchanged(value, path[0], _replaced(value[path[0]], path[1:], tensor)) if path else tensor


def _found(value: Any, path: Path) -> Any:
    try:
        return part(value, path)
    except (LookupError, TypeError):
        return None


UNKNOWN: Place = {(): Unknown()}


class Layouts(dict[Location, Place]):
    """Places by event; an event that is not there has whole values.

    `called` has the module that an operation calls, where it calls one: values of other operations are never known.
    """

    def __init__(self) -> None:
        super().__init__()
        self.called: dict[tuple[str, str], str] = {}

    def at(self, event: Location) -> Place:
        if not event.operation:
            return self.get(event, WHOLE)
        module = self.called.get((event.path, event.operation))
        return UNKNOWN if module is None else self.at(Location(module, event.kind))

    def known(self, event: Location) -> bool:
        """Whether the value at `event` can be made whole."""
        return not any(isinstance(layout, Unknown) for layout in self.at(event).values())

    def of_call(self, path: str, names: Sequence[str]) -> Place:
        """Of the arguments of a call by hand, which may give by name what the model gives by position."""
        place = self.at(Location(path, "inputs"))
        both = dict(place)
        for (kind, key), layout in cast("Mapping[tuple[int, Any], Layout]", place).items():
            if kind == 0 and key < len(names):
                both[1, names[key]] = layout
            elif kind == 1 and key in names:
                both[0, names.index(key)] = layout
        return both
