"""Rows of one run inside the tensors of a batch of transformers, which is padded on the left."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from nnsight_async.errors import IsolationError
from nnsight_async.interleave.locations import Location
from nnsight_async.interleave.rows import Batch, Path, Private, Slab, Span, copied
from nnsight_async.interleave.together import Write


@dataclass(slots=True)
class Padded(Batch):
    """`sequences` of `length` tokens each, the padding on their left included; `rows` is their product.

    `drawing`: what passes now has one row for each sequence, to draw a token from. `graph`: gradients can be taken.
    """

    sequences: int = 1
    length: int = 1
    drawing: bool = False
    graph: bool = False

    @classmethod
    def of(cls, sequences: int, length: int, *, graph: bool) -> Padded:
        return cls(sequences * length, sequences > 1, sequences, length, graph=graph)

    def drawn(self) -> Padded:
        """The same sequences when a token is drawn for each."""
        return Padded(self.sequences, self.shared, self.sequences, drawing=True, graph=self.graph)

    def span(self, sequence: int, tokens: int = 1) -> Span:
        """The rows of the last `tokens` of a sequence."""
        end = (sequence + 1) * self.length
        return Span(end - tokens, end)

    def own(self, tensor: torch.Tensor, start: int) -> torch.Tensor | None:
        """The part of `tensor` that belongs to the run whose rows begin at `start`, as a view; None: there is none.

        `[sequences, length, ...]` of up to three dimensions is the run's tokens, `[tokens, ...]`, and so is what has
        sequences and tokens in one dimension; anything else that begins with the sequences is `[1, ...]`.
        """
        shape = tensor.shape
        if not shape:
            return None
        sequence, padding = divmod(start, self.length)
        if not self.drawing:
            if 2 <= len(shape) <= 3 and shape[0] == self.sequences and shape[1] == self.length:
                own = tensor[sequence]
                return own.narrow(0, padding, self.length - padding) if padding else own
            if shape[0] == self.rows:
                return tensor[start : (sequence + 1) * self.length]
        return tensor[sequence : sequence + 1] if shape[0] == self.sequences else None


class PaddedSlab(Slab):
    """The value at a location for a padded batch.

    Where gradients are taken, what a block is handed is a part of the graph that keeps its gradient, and the forward
    pass goes on from it.
    """

    batch: Padded

    def __init__(
        self,
        value: Any,
        batch: Batch,
        place: Location,
        spans: Sequence[Span],
        *,
        before: Slab | None = None,
        experts: Sequence[str] = (),
    ) -> None:
        """`experts`: the paths of modules in which rows are in the order of experts, and not of tokens."""
        super().__init__(value, batch, place, spans, before=before)
        self._mixed = bool(experts) and mixes(place, experts)

    @property
    def graph(self) -> bool:
        return self.batch.graph

    def again(self, value: Any, rows: Mapping[Path, torch.Tensor]) -> Private:
        private = Private()
        private.value = copied(value, rows, private, copy=self._handed)
        return private

    def _copy_tensor(self, tensor: torch.Tensor, span: Span, private: Private, path: Path) -> torch.Tensor:
        if self.graph:
            with torch.enable_grad():  # whatever mode the block is in
                handed = self._handed(self._own(tensor, span.start, 0))
        else:
            handed = self._own(tensor, span.start, 0).clone()
        private.add(path, handed)
        return handed

    def _handed(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self.graph or not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor.clone()
        with torch.enable_grad():
            handed = rooted(tensor)
            handed.retain_grad()
        return handed

    def _shape(self, ours: torch.Tensor, span: Span) -> tuple[int, ...]:
        own = self._part(ours, span.start)
        if own is None and self.batch.shared:
            raise IsolationError(
                f"{self.place} holds a tensor of shape {tuple(ours.shape)}, which is that of all prompts of the trace; "
                "it cannot be changed for one of them"
            )
        return tuple(ours.shape if own is None else own.shape)

    def _own(self, tensor: torch.Tensor, start: int, rows: int) -> torch.Tensor:
        own = self._part(tensor, start)
        return tensor if own is None else own

    def _part(self, tensor: torch.Tensor, start: int) -> torch.Tensor | None:
        return None if self._mixed else self.batch.own(tensor, start)

    def _replace(self, value: Any, path: Path, writes: list[Write]) -> Any:
        if not path or not isinstance(value, Mapping):
            return super()._replace(value, path, writes)
        changed: Any = copy.copy(cast("Any", value))  # of a class of transformers, which it is to keep
        changed[path[0]] = self._replace(value[path[0]], path[1:], writes)
        return changed

    def _written(self, tensor: torch.Tensor, writes: list[Write]) -> torch.Tensor:
        if writes[-1][1].numel() == tensor.numel():
            tensor = writes[-1][1].clone().reshape(tensor.shape)
            writes = []
        elif id(tensor) not in self._ours:
            tensor = tensor.clone()
        self._ours.add(id(tensor))
        for start, rows in writes:
            self._own(tensor, start, 0).copy_(rows)
        return tensor

    def _whole(self, tensor: torch.Tensor) -> bool:
        return False


def mixes(place: Location, experts: Sequence[str]) -> bool:
    """Whether rows at `place` are in the order of experts: it lies in one of these modules."""
    return any(place.path.startswith(f"{path}.") or (place.path == path and place.operation) for path in experts)


def rooted(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `tensor` that gradients reach, whatever it was computed from: it is no leaf, and may be changed."""
    return cast("torch.Tensor", _Rooted.apply(tensor, torch.empty(0, device=tensor.device, requires_grad=True)))


class _Rooted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore
        return gradient, None


def experts_of(model: torch.nn.Module) -> list[str]:
    """The modules that hold the experts of a mixture, which compute the rows of each expert together."""
    return [
        path
        for path, module in model.named_modules()
        if type(module).__name__.endswith("Experts") or path.rpartition(".")[2] == "experts"
    ]
