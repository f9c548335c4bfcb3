"""Saved values that stay in the message that brought them until somebody looks at them."""

from __future__ import annotations

from collections.abc import Sequence
from threading import RLock
from typing import Any, ClassVar

import msgspec

from nnsight_async.runs.packing import Flat, Unreadable, unpack


class Brought:
    """What several runs have saved in one step, in the memory in which it came.

    Whoever keeps one run's values would keep those of all: `part` takes out the few that are still wanted.
    """

    __slots__ = ("__weakref__", "_flats", "_lock", "_parted", "_values", "damaged", "names", "unseen")

    def __init__(
        self, entries: Sequence[tuple[str, str, Any]], flats: Sequence[Flat | Unreadable], count: int, damaged: str
    ) -> None:
        """`entries` of so many runs, which `check_together` has looked at: `damaged` is what it found."""
        self.names = tuple(name for name, _, _ in entries)
        self.damaged = damaged
        self.unseen = bytearray(b"\1" * count)
        """By run: whether somebody may still look at its values for the first time."""
        self._values = [value for _, _, value in entries]
        self._flats: Sequence[Flat | Unreadable] = flats
        self._parted: dict[int, dict[str, Any]] | None = None
        self._lock = RLock()

    def hand_over(self, unread: Unread) -> None:
        """Give a run its values, if it does not have them yet."""
        with self._lock:  # `part` lets the memory go, which may be used again
            if unread.found is None:
                index = unread.index
                unread.found = self._made(index) if self._parted is None else self._parted.pop(index)
                self.unseen[index] = 0

    @property
    def dwindled(self) -> bool:
        """Whether it is kept for less than half of its values."""
        return 2 * sum(self.unseen) < len(self.unseen)

    @property
    def parted(self) -> bool:
        """Whether it has no memory of its own any more."""
        return self._parted is not None

    def part(self) -> None:
        """Copy what may still be looked at, and let the memory go."""
        with self._lock:
            self._parted = {index: self._made(index) for index, unseen in enumerate(self.unseen) if unseen}
            self._values, self._flats = [], ()

    def _made(self, index: int) -> dict[str, Any]:
        values = zip(self.names, self._values, strict=True)
        return {name: unpack(value, self._flats, index) for name, value in values}


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
        self.brought.unseen[self.index] = 0

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

    def __reduce__(self) -> Any:
        return dict, (self.values(),)


def looked_at(values: dict[str, Any] | Unread) -> dict[str, Any]:
    """The values themselves."""
    return values.values() if isinstance(values, Unread) else values
