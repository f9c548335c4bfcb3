"""A visit that reads a tensor once, as most do, and needs nothing of what changes take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnsight_async.interleave.visit import Visit

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from nnsight_async.interleave.locations import Location
    from nnsight_async.interleave.rows import Slab, Span, Written
    from nnsight_async.interleave.views import View
    from nnsight_async.local.slab import Padded


class Reading(Visit):
    """The visit of a run that is alone at a tensor; with the second thing that is asked of it, it is a whole one."""

    __slots__ = ("_batch", "_copy", "_make", "_value", "_whole")

    def __init__(
        self, event: Location, value: torch.Tensor, batch: Padded, span: Span, make: Callable[..., Slab]
    ) -> None:
        self.event = event
        self.span = span
        self._value = value
        self._batch = batch
        self._make = make
        self._copy: torch.Tensor | None = None
        self._whole = False

    def get(self) -> Any:
        if self._copy is not None or self._whole:
            self._unfold()
            return super().get()
        own = self._batch.own(self._value, self.span.start)
        copy = self._copy = (self._value if own is None else own).clone()
        return copy

    def see(self, view: View, place: object) -> Any:
        self._unfold()
        return super().see(view, place)

    def set(self, value: Any) -> None:
        self._unfold()
        super().set(value)

    def show(self, view: View, part: Any, place: object) -> None:
        self._unfold()
        super().show(view, part, place)

    def changes(self) -> Written:
        if not self._whole and (self._copy is None or not self._copy._version):
            return []
        self._unfold()
        return super().changes()

    @property
    def wrote(self) -> bool:
        return self._whole and super().wrote

    def _unfold(self) -> None:
        if not self._whole:
            self._whole = True
            super().__init__(self.event, self._make(self._value, self._batch, self.event, (self.span,)), self.span)
            if self._copy is not None:
                self._handed_before(self._copy)
