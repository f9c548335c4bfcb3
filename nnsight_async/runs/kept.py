"""Messages of values that nobody has looked at: which of them are not worth their memory any more."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING
from weakref import ref

if TYPE_CHECKING:
    from nnsight_async.runs.unread import Brought

GRACE = 32
"""So many messages are left alone: what they hold is mostly looked at, or dropped, before the next few have come."""

LOOKS = 16
"""How many are looked at at a time while none come."""


class Kept:
    """Parts messages that are kept for less than half of what they hold.

    Else one long run that nobody reads would keep, with each of its values, those of all runs that went along with it.
    """

    def __init__(self) -> None:
        self._messages: deque[list[ref[Brought]]] = deque()

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, *brought: Brought) -> None:
        """One more has come, with this: look at two of the oldest, so that each is looked at again and again."""
        self._messages.append([ref(each) for each in brought])
        for _ in range(2):
            if len(self._messages) > GRACE:
                self._look_at(self._messages.popleft())

    def look(self) -> None:
        """None have come for a while: look at a few of the oldest."""
        for _ in range(min(LOOKS, len(self._messages))):
            self._look_at(self._messages.popleft())

    def _look_at(self, message: list[ref[Brought]]) -> None:
        brought = [each for found in message if (each := found()) is not None and not each.parted]
        if not brought:
            return
        if 2 * sum(each.wanted for each in brought) < brought[0].whole:
            for each in brought:
                each.part()
        else:
            self._messages.append(message)
