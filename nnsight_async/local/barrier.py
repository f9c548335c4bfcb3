"""Invokes of one trace that wait for each other, and see each other's values."""

from __future__ import annotations

import sys
from itertools import count
from typing import TYPE_CHECKING, Any, cast

import torch

from nnsight_async.errors import NNsightError, OutsideBlockError
from nnsight_async.interleave.interleaver import Interleaver
from nnsight_async.interleave.modes import MODES_CHANGED, Modes
from nnsight_async.local.reading import Reading
from nnsight_async.local.slab import mixes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nnsight_async.interleave.block import BlockRun
    from nnsight_async.interleave.locations import Location
    from nnsight_async.interleave.rows import Batch, Span
    from nnsight_async.local.slab import Padded

_numbers = count(1).__next__


class Barrier:
    """What `tracer.barrier(n)` gives: a call in the block of an invoke waits until `n` of them have called it.

    From there on each sees the names that the others had bound then. The forward pass does not wait: whoever comes
    first must want nothing that lies before the place where the last one calls.
    """

    __block_advice__ = "make the barrier with the tracer of this trace"

    def __init__(self, parties: int) -> None:
        if parties < 1:
            raise ValueError(f"barrier({parties}): the number of invokes that call it is expected")
        self._parties = parties
        self._number = _numbers()

    def __call__(self) -> None:
        raise OutsideBlockError("a barrier is called in the blocks of invokes")

    def __block_reference__(self) -> tuple[str, ...]:
        return ("barrier", str(self._number), str(self._parties))


class Meeting:
    """A barrier where the blocks run."""

    def __init__(self, parties: int, interleaver: MeetingPlace) -> None:
        self._parties = parties
        self._interleaver = interleaver
        self._came: list[tuple[BlockRun, dict[str, Any], dict[str, Any]]] = []

    def of(self, run: BlockRun) -> Callable[[], None]:
        """What the block of `run` calls."""

        def call() -> None:
            frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
            self._came.append((run, dict(frame.f_locals), frame.f_globals))
            if len(self._came) < self._parties:
                run.park(self)
            else:
                self._open()

        return call

    def _open(self) -> None:
        came, self._came = self._came, []
        for _, names, _ in came:
            for _, _, seen in came:
                seen.update(names)
        self._interleaver.released += [run for run, _, _ in came[:-1]]

    def __str__(self) -> str:
        return (
            f"the block waits at a barrier, which {len(self._came)} of {self._parties} blocks have come to: all "
            "invokes that call it have to call it equally often, and tracer.barrier(n) takes how many they are"
        )


class MeetingPlace(Interleaver):
    """Gives invokes their turns in their order, and those released at a barrier another one at the same value."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.released: list[BlockRun] = []
        self._before = Modes.now()
        """The modes of torch when the step began."""
        self._lean = False
        """Whether a turn in this step may take no more than a reading."""
        self.experts: Sequence[str] = ()
        """The modules in which rows are in the order of experts."""

    def begin_step(self, spans: Mapping[BlockRun, Span], batch: Batch, *, stacked: bool = False) -> None:
        self._before = Modes.now()
        self._lean = not (stacked or cast("Padded", batch).graph)
        super().begin_step(spans, batch, stacked=stacked)
        self._release()

    def end_step(self) -> None:
        if self._present and Modes.now() != self._before:
            for run in self._present:  # nothing in their text switches a mode, so that nobody has watched them
                run.fail(NNsightError(MODES_CHANGED))
            self._before.restore()
        super().end_step()

    def end(self, run: BlockRun) -> None:
        before = Modes.now()
        super().end(run)
        if Modes.now() != before:
            before.restore()

    def fire(self, event: Location, value: Any) -> Any:
        runs = self.waiting.get(event)
        if runs and type(value) is torch.Tensor and self._lean and len(runs) == 1 and self._reads(runs[0], event):
            value = self._fire_alone(event, value, runs[0])
        else:
            if runs and len(runs) > 1:  # they have come in the order of what they read before
                runs.sort(key=lambda run: self._spans[run].start)
            value = super().fire(event, value)
        while self.released and (late := [run for run in self._release() if run.waits == event]):
            others = [run for run in self.waiting[event] if run not in late]
            for run in others:  # they wait for the next time
                self.waiting.forget(run)
            value = super().fire(event, value)
            for run in others:
                self.waiting.enlist(run)
        return value

    def _reads(self, run: BlockRun, event: Location) -> bool:
        """Whether a turn at `event` takes no more than a reading, unless the block writes."""
        if self.running or run.gives_out or event in self._collecting:
            return False
        return not (self.experts and mixes(event, self.experts))

    def _fire_alone(self, event: Location, value: torch.Tensor, run: BlockRun) -> Any:
        if run.watched:
            self.modes = Modes.now()
        self.waiting.leave(event)
        visit = Reading(event, value, cast("Padded", self._batch), self._spans[run], self.setting.slab)
        self._visit(run, visit)
        return self._written(visit.slab, (run,), ()) if visit.wrote else value

    def _release(self) -> list[BlockRun]:
        """Have those go on that were released, until they wait again."""
        went: list[BlockRun] = []
        while self.released:
            run = self.released.pop(0)
            run.resume()
            self.waiting.enlist(run)
            went.append(run)
        return went
