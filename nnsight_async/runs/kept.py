"""Messages of values that nobody has looked at: which of them are not worth their memory any more."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING
from weakref import ref

if TYPE_CHECKING:
    from nnsight_async.runs.unread import Brought

GRACE = 32
"""So many messages are left alone: what they hold is mostly looked at, or dropped, before the next few have come."""


class Kept:
    """Parts messages that are kept for less than half of their values.

    Else one long run that nobody reads would keep, with each of its values, those of all runs that went along with it.
    """

    def __init__(self) -> None:
        self._messages: deque[ref[Brought]] = deque()

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, brought: Brought) -> None:
        """One more has come: look at two of the oldest, so that each is looked at again and again."""
        self._messages.append(ref(brought))
        for _ in range(2):
            if len(self._messages) > GRACE:
                self._look_at(self._messages.popleft())

    def _look_at(self, message: ref[Brought]) -> None:
        brought = message()
        if brought is None or brought.parted:
            return
        if brought.dwindled:
            brought.part()
        else:
            self._messages.append(message)
