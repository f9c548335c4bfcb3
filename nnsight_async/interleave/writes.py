"""What blocks wrote, kept so that a preempted request is computed again with the same writes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nnsight_async.interleave.locations import Location
from nnsight_async.interleave.rows import Slab, Span, Written

if TYPE_CHECKING:
    from nnsight_async.interleave.block import BlockRun


@dataclass(slots=True)
class _Write:
    position: int
    nth: int
    written: Written
    in_place: bool


class WriteLog:
    """Writes by run and location, keyed by absolute token position.

    vLLM preempts by dropping the key-value cache of a request; when the request comes back all its tokens pass once
    more, in one step (V1 runner: resumed, V2 runner: sent as new; vLLM 0.32, 0.33).
    """

    def __init__(self) -> None:
        self._writes: dict[BlockRun, dict[Location, list[_Write]]] = {}
        self._spans: dict[BlockRun, Span] = {}
        self._events: dict[Location, list[BlockRun]] = {}
        self._passed: Counter[tuple[BlockRun, Location]] = Counter()
        self.replays = 0
        """How often a run that had written something was computed again."""

    def add(
        self, run: BlockRun, event: Location, span: Span, written: Written, *, nth: int = 0, in_place: bool = False
    ) -> None:
        """Keep what was written in the `nth` passage of a step, or, where that is not known, in a later one."""
        writes = self._writes.setdefault(run, defaultdict(list))[event]
        position = span.position + span.replayed
        if writes and writes[-1].position == position:
            nth = max(nth, writes[-1].nth + 1)
        writes.append(_Write(position, nth, written, in_place))

    def replay(self, run: BlockRun, span: Span) -> Iterable[Location]:
        """Prepare to repeat what `run` wrote in the rows that `span` computes again; returns where."""
        events = tuple(self._writes.get(run, ()))
        self.replays += bool(events)
        self._spans[run] = span
        for event in events:
            self._events.setdefault(event, []).append(run)
        return events

    @property
    def replays_now(self) -> bool:
        """Whether something is repeated in this step."""
        return bool(self._events)

    def holds(self, run: BlockRun) -> bool:
        """Whether `run` has written anything that would have to be repeated."""
        return run in self._writes

    def replaying(self, event: Location) -> Iterable[BlockRun]:
        return self._events.get(event, ())

    def apply(self, run: BlockRun, event: Location, slab: Slab) -> None:
        span, passed = self._spans[run], self._passed[run, event]
        self._passed[run, event] += 1
        for write in self._writes[run][event]:
            offset = write.position - span.position
            if write.nth == passed and 0 <= offset < span.replayed:
                rows = _first(write.written, span.replayed - offset)
                slab.put(span.start - span.replayed + offset, rows, in_place=write.in_place)

    def finish(self) -> Iterable[Location]:
        """The step is over; returns the locations at which writes were repeated."""
        events = tuple(self._events)
        self._events.clear()
        self._spans.clear()
        self._passed.clear()
        return events

    def forget(self, run: BlockRun) -> None:
        self._writes.pop(run, None)


def _first(written: Written, rows: int) -> Written:
    """At most the first `rows` rows: a prompt may come back in pieces."""
    return [(path, _narrow(tensor, rows)) for path, tensor in written]


def _narrow(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return tensor[:rows] if tensor.shape[0] > rows else tensor
