"""Saved values that stay in the message that brought them until somebody looks at them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from nnsight_async.runs.packing import Flat, Unreadable, unpack

_Held = tuple[Sequence[Any], Sequence[Flat | Unreadable]]
"""Packed values, and the memory that they are in."""


class Brought:
    """What several runs have saved in one step, in the memory in which it came.

    Whoever keeps one run's values would keep those of all: `part` takes out the few that are still wanted.

    Nothing here takes a lock: values are made where the lock of a run is held, and while they are made the garbage
    collector may call what takes the lock of another.
    """

    __slots__ = ("__weakref__", "_each", "_held", "_taken", "damaged", "names", "unseen", "whole")

    def __init__(
        self,
        entries: Sequence[tuple[str, str, Any]],
        flats: Sequence[Flat | Unreadable],
        count: int,
        each: int,
        damaged: str,
    ) -> None:
        """`entries` of `count` runs that have `each` bytes of `flats`; `damaged` is what `check_together` found."""
        self.names = tuple(name for name, _, _ in entries)
        self.damaged = damaged
        self.whole = sum(flat.nbytes for flat in flats)
        """Bytes of the message, which may hold more than this."""
        self.unseen = bytearray(b"\1" * count)
        """By run: whether somebody may still look at its values for the first time."""
        self._each = each
        self._held: _Held | None = [value for _, _, value in entries], flats
        self._taken: dict[int, dict[str, Any]] = {}
        """By run: values that were made, and that it does not have yet."""

    @property
    def wanted(self) -> int:
        """Bytes of what may still be looked at."""
        return self._each * sum(self.unseen)

    @property
    def parted(self) -> bool:
        """Whether it has no memory of its own any more."""
        return self._held is None

    def hand_over(self, unread: Unread) -> None:
        """Give a run its values, if it does not have them yet: of several threads, all get what the first has made."""
        held, index = self._held, unread.index
        if held is None:
            found = self._taken.get(index)
        else:
            found = self._taken.setdefault(index, self._made(held, index))
        if unread.found is None:
            unread.found = found
        self.forget(index)

    def forget(self, index: int) -> None:
        """A run has its values, or wants none. Finalisers call this."""
        self.unseen[index] = 0
        self._taken.pop(index, None)
        if 1 not in self.unseen:
            self._held = None

    def part(self) -> None:
        """Copy what may still be looked at, and let the memory go."""
        held = self._held
        if held is None:
            return
        for index, unseen in enumerate(self.unseen):
            if unseen:
                self._taken.setdefault(index, self._made(held, index))
                if not self.unseen[index]:  # by now: another thread has them
                    self._taken.pop(index, None)
        self._held = None

    def _made(self, held: _Held, index: int) -> dict[str, Any]:
        values, flats = held
        return {name: unpack(value, flats, index) for name, value in zip(self.names, values, strict=True)}


class Unread(msgspec.Struct, eq=False, gc=False):  # see `Token`
    """What one of the runs of `brought` says at the end of a step: a `Frame` that holds nothing but values.

    Tokens have it in the place of their values, until they are asked for them.
    """

    key: int
    step: int
    number: int
    size: int
    brought: Brought
    index: int
    found: dict[str, Any] | None = None

    done: ClassVar = False
    stopped: ClassVar = False
    ended: ClassVar = False
    error: ClassVar = None
    printed: ClassVar = ""
    warned: ClassVar[list[Any]] = []
    part: ClassVar = 0

    def __del__(self) -> None:
        self.brought.forget(self.index)

    @property
    def damaged(self) -> str:
        """Why the values could not be read, if they could not."""
        return self.brought.damaged

    @property
    def names(self) -> Sequence[str]:
        return self.brought.names

    @property
    def entries(self) -> list[tuple[str, str, Any]]:
        return [(name, "set", value) for name, value in self.values().items()]

    def values(self) -> dict[str, Any]:
        """The values by name, with memory of their own; the same ones each time, in whatever thread."""
        if self.found is None:
            self.brought.hand_over(self)
        assert self.found is not None
        return self.found

    def __eq__(self, other: object) -> bool:
        return self.values() == other

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.values())

    def __copy__(self) -> dict[str, Any]:
        return dict(self.values())

    def __reduce__(self) -> Any:
        return dict, (self.values(),)


def looked_at(values: dict[str, Any] | Unread) -> dict[str, Any]:
    """The values themselves."""
    return values.values() if isinstance(values, Unread) else values
