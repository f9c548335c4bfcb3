"""A block at a location: what it was handed there, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from nnsight_async.interleave.rows import Private, copied

if TYPE_CHECKING:
    from nnsight_async.interleave.locations import Location
    from nnsight_async.interleave.rows import Path, Slab, Span, Written
    from nnsight_async.interleave.views import View


@dataclass(slots=True)
class _Handed:
    """One reading: the copy, and the part of it that the block got, where that is a tensor of its own."""

    private: Private
    view: View | None = None
    part: torch.Tensor | None = None
    version: int = 0
    shared: bool = False

    def changed(self) -> bool:
        return self.private.changed() or (self.part is not None and self.part._version != self.version)

    def value(self) -> Any:
        """The whole value with the changes in it."""
        if self.part is None or self.view is None or self.part._version == self.version:
            return self.private.value
        return self.view.put(self.private.value, self.part)

    def settle(self) -> None:
        self.private.settle()
        if self.part is not None:
            self.version = self.part._version


@dataclass(slots=True)
class Visit:
    """The batch's value at `event`, this run's rows of it, and what the block has been handed of them.

    Every reading is a copy of its own, with all changes made up to then in it; so one that was kept is not changed by
    what is done through a later one.
    """

    event: Location
    slab: Slab
    span: Span
    _first: Private | None = None
    _rows: dict[Path, torch.Tensor] = field(default_factory=dict["Path", torch.Tensor])
    _shared: bool = False
    _handed: list[_Handed] = field(default_factory=list[_Handed])

    def get(self) -> Any:
        """A private copy of the rows."""
        handed = _Handed(self._take())
        self._handed.append(handed)
        return handed.private.value

    def see(self, view: View) -> Any:
        """A part of a private copy. Changes made to it in place land as changes of the copy itself do."""
        private = self._take()
        with torch.inference_mode(False), torch.no_grad():
            part = view.get(private.value)
        handed = _Handed(private, view, shared=view.shared(private.value))
        if isinstance(part, torch.Tensor) and not private.watches(part):
            handed.part, handed.version = part, part._version
        self._handed.append(handed)
        return part

    def set(self, value: Any) -> None:
        """Replace the value; `ShapeError` if it does not fit."""
        self._flush()
        last = self._handed[-1].private if self._handed else None
        self._keep(self.slab.checked(self.span, value, last), own=False)

    def show(self, view: View, part: Any) -> None:
        """Replace a part of the value."""
        private = self._take()
        self._shared = self._shared or view.shared(private.value)
        self._keep(self.slab.checked(self.span, view.put(private.value, part), private), own=False)

    def commit(self) -> Written:
        """Have what the block put here, or changed in place, written to the batch, and return it."""
        self._flush()
        written = list(self._rows.items())
        if written:
            self.slab.put(self.span.start, written, in_place=self._shared)
        return written

    @property
    def wrote(self) -> bool:
        """Whether the block has changed anything here."""
        return bool(self._rows)

    def _take(self) -> Private:
        if self._first is None and not self._rows:
            self._first = self.slab.take(self.span)
            return self._first
        self._flush()
        first = self._first if self._first is not None else self.slab.take(self.span)
        self._first, private = first, Private()
        with torch.inference_mode(False):
            private.value = copied(first.value, self._rows, private)
        return private

    def _flush(self) -> None:
        for handed in self._handed:
            if handed.changed():
                self._shared = self._shared or handed.shared
                self._keep(self.slab.checked(self.span, handed.value(), handed.private), own=True)
                handed.settle()

    def _keep(self, written: Written, *, own: bool) -> None:
        """Remember rows to be written; the caller's own tensors as they are now."""
        for path, rows in written:
            self._rows[path] = rows if own else rows.clone()
