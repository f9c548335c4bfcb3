"""What came of each step of a run, for those who read it step by step."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from nnsight_async.runs.token import Token
from nnsight_async.runs.unread import Unread

SlowConsumers = Literal["fail", "drop"]
"""What becomes of a run whose consumer leaves too many values unread: it fails, or the oldest values are dropped."""


class Step(msgspec.Struct, eq=False, gc=False):  # see `Token`
    """The token of a step (None: after the last one) and what was saved in it, which took `size` bytes on its way.

    One that was dropped has its token without the values, and `lost` is the reason of the `SlowConsumerError` to raise
    for it. A run and the group that it is in share it.
    """

    token: Token | None
    saves: dict[str, Any] | Unread
    size: int = 0
    read: bool = False
    lost: str = ""

    def drop(self, lost: str) -> None:
        self.lost = lost
        self.saves = {}
        if self.token is not None:
            self.token = replace(self.token, saves={}, dropped=True)


@dataclass(slots=True)
class Buffer:
    """The values of past steps that a run keeps for those who read them step by step, up to `limit` bytes.

    What was saved in the newest step stays, whatever it takes.
    """

    limit: int = sys.maxsize
    slow_consumers: SlowConsumers = "fail"
    dropped: int = 0
    _held: int = 0
    _oldest: int = 0

    def add(self, size: int) -> bool:
        """One more step has so many bytes; returns whether that is too much."""
        self._held += size
        return self._held > self.limit

    def excess(self, steps: list[Step]) -> Iterator[Step]:
        """The oldest steps whose values are to be dropped, one by one, until the others fit."""
        while self._held > self.limit and self._oldest < len(steps) - 1:
            step = steps[self._oldest]
            self._oldest += 1
            self._held -= step.size
            if step.size:
                yield step

    def drop(self, step: Step) -> None:
        self.dropped += 1
        step.drop(self.reason if self.slow_consumers == "fail" else "")

    @property
    def reason(self) -> str:
        """That of the `SlowConsumerError` of a run whose values are not read in time."""
        return (
            f"more than max_buffered_bytes={self.limit:,} of saved values waited for the reader of a stream; read it "
            'faster, save less, or build the model with a larger max_buffered_bytes or with slow_consumers="drop"'
        )
