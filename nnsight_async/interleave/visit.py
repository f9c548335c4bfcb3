"""A block at a location: what it was handed there, and what becomes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nnsight_async.interleave.rows import Private, copied, part

if TYPE_CHECKING:
    from nnsight_async.interleave.locations import Location
    from nnsight_async.interleave.rows import Path, Slab, Span, Written
    from nnsight_async.interleave.views import View


class _Handed:
    """One reading: the copy, and the part of it that the block got, where that is a tensor of its own."""

    part: torch.Tensor | None = None
    version = 0
    place: object = None
    """What the block calls it, where that is not the location."""
    before: list[tuple[torch.Tensor, torch.Tensor]] | None = None
    """Its tensors with what was in them, where changes may go uncounted; the part comes last."""

    def __init__(self, private: Private, view: View | None, base: Any, *, shared: bool) -> None:
        """`base`: the value as it was handed out, kept where several readings may change different parts of it."""
        self.private = private
        self.view = view
        self.base = base
        self.shared = shared

    def changed(self) -> bool:
        if self.private.changed() or (self.part is not None and self._part_changed()):
            return True
        return self.before is not None and any(not _equal(tensor, was) for tensor, was in self.before)

    def _part_changed(self) -> bool:
        if self.part is None:
            return False
        return self.part._version != self.version or (self.before is not None and not _equal(*self.before[-1]))

    def watch(self) -> None:
        """Notice changes of the memory too."""
        tensors = [*self.private.tensors.values(), *(() if self.part is None else (self.part,))]
        self.before = [(tensor, tensor.clone()) for tensor in tensors]

    def value(self) -> Any:
        """The whole value with the changes in it."""
        if self.part is None or self.view is None or not self._part_changed():
            return self.private.value
        return self.view.put(self.private.value, self.part)

    def over(self, now: Any) -> Any:
        """The whole value as it is now, with what was changed in the part since it was handed out."""
        assert self.part is not None
        assert self.view is not None
        changed = self.part != self.view.get(self.base)
        return self.view.put(now, torch.where(changed, self.part, self.view.get(now)))

    def settle(self) -> None:
        self.private.settle()
        if self.part is not None:
            self.version = self.part._version
        if self.before is not None:
            self.watch()


def _equal(tensor: torch.Tensor, was: torch.Tensor) -> bool:
    return torch.equal(tensor, was) or torch.equal(tensor.nan_to_num(), was.nan_to_num())


class Visit:
    """The batch's value at `event`, this run's rows of it, and what the block has been handed of them.

    Every reading is a copy of its own, with all changes made up to then in it; so one that was kept is not changed by
    what is done through a later one.
    """

    __slots__ = ("_first", "_handed", "_latest", "_rows", "_shared", "event", "given_out", "place", "slab", "span")

    def __init__(self, event: Location, slab: Slab, span: Span, given_out: bool = False) -> None:
        """`given_out`: the block may change what it is handed by its memory, where changes are not counted."""
        self.event = event
        self.slab = slab
        self.span = span
        self.given_out = given_out
        self.place: object = event
        """What the block has called it last."""
        self._first: Private | None = None
        self._rows: dict[Path, torch.Tensor] = {}
        self._shared = False
        self._handed: list[_Handed] = []
        self._latest: _Handed | None = None
        """The last reading, unless something else has been put here since."""

    def get(self) -> Any:
        """A private copy of the rows."""
        handed = self._hand(self._take())
        if self.given_out:
            handed.watch()
        return handed.private.value

    def see(self, view: View, place: object) -> Any:
        """A part of a private copy. Changes made to it in place land as changes of the copy itself do.

        `place`: what the block calls it.
        """
        private = self._take()
        with torch.inference_mode(False), torch.no_grad():
            seen = view.get(private.value)
        handed = self._hand(private, view, view.shared(private.value))
        handed.place = self.place = place
        if isinstance(seen, torch.Tensor) and not private.watches(seen):
            handed.part, handed.version = seen, seen._version
        if self.given_out:
            handed.watch()
        return seen

    def _handed_before(self, tensor: torch.Tensor) -> None:
        """A tensor that was handed out, with a version of 0, is the first reading."""
        self._first = Private(tensor)
        self._first.add((), tensor, version=0)
        self._hand(self._first)

    def _hand(self, private: Private, view: View | None = None, shared: bool = False) -> _Handed:
        """Note a reading; from the second on, with what it was, so that the changes of each can be told apart."""
        if self._handed:
            base = copied(private.value, {}, Private())
            if self._handed[0].base is None and self._first is not None:
                self._handed[0].base = self.slab.original(self.span)
        else:
            base = None
        handed = self._latest = _Handed(private, view, base, shared=shared)
        self._handed.append(handed)
        return handed

    def set(self, value: Any) -> None:
        """Replace the value; `ShapeError` if it does not fit."""
        self._flush()
        last = self._handed[-1].private if self._handed else None
        self._keep(self.slab.checked(self.span, value, last))
        self._latest = None

    def show(self, view: View, part: Any, place: object) -> None:
        """Replace a part of the value, which the block calls `place`."""
        private, self.place = self._take(), place
        self._shared = self._shared or view.shared(private.value)
        self._keep(self.slab.checked(self.span, view.put(private.value, part), private, place))
        self._latest = None

    def changes(self) -> Written:
        """What the block put here, or changed in place."""
        self._flush()
        if self.slab.graph and self._latest is not None:
            self._pass_on(self._latest)
        return list(self._rows.items())

    def _pass_on(self, latest: _Handed) -> None:
        """Have the forward pass go on from what was handed out, so that gradients reach it."""
        self._shared = self._shared or latest.shared
        self._rows.update((path, rows) for path, rows in latest.private.tensors.items() if rows.requires_grad)

    def commit(self) -> None:
        """Have the changes written to the batch."""
        if self._rows:
            self.slab.put(self.span.start, list(self._rows.items()), in_place=self.in_place)

    @property
    def in_place(self) -> bool:
        """Whether changes have to reach others who hold the same tensors."""
        return self._shared

    @property
    def wrote(self) -> bool:
        """Whether the block has changed anything here."""
        return bool(self._rows)

    def _take(self) -> Private:
        if self._first is None and not self._rows:
            self._first = self.slab.take(self.span)
            return self._first
        self._flush()
        return self._now()

    def _now(self) -> Private:
        """A copy of the rows with the changes made so far."""
        if self._first is None:
            self._first = self.slab.take(self.span)
        return self.slab.again(self._first.value, self._rows)

    def _flush(self) -> None:
        for handed in self._handed:
            if handed.changed():
                if handed is not self._latest:
                    self._latest = None
                self._shared = self._shared or handed.shared
                if handed.part is not None and handed.base is not None and self._rows:
                    now = self._now()
                    self._rows.update(self.slab.checked(self.span, handed.over(now.value), now, handed.place))
                else:
                    private = None if self.given_out else handed.private
                    self._merge(self.slab.checked(self.span, handed.value(), private, handed.place), handed.base)
                handed.settle()

    def _keep(self, written: Written) -> None:
        """Remember rows to be written: the block's own tensors as they are now."""
        for path, rows in written:
            self._rows[path] = rows.clone()

    def _merge(self, written: Written, base: Any) -> None:
        """Remember what was changed in a reading, beside what was changed through others since it was handed out."""
        for path, rows in written:
            others = self._rows.get(path)
            if others is None or base is None:
                self._rows[path] = rows
            else:
                self._rows[path] = torch.where(rows != part(base, path), rows, others)
