"""Blocks on the stages of a pipeline: every stage runs them, with the values of all stages."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

from nnsight_async.errors import UnsupportedError
from nnsight_async.interleave.block import BlockRun
from nnsight_async.interleave.cache import Cache
from nnsight_async.interleave.elsewhere import Reaching
from nnsight_async.interleave.locations import Location, expression
from nnsight_async.interleave.passed import (
    Absent,
    Cached,
    Entry,
    Failed,
    Stages,
    Told,
    Visited,
    Wire,
    diverged,
    portable,
    stands,
)
from nnsight_async.interleave.randomness import OwnRandomness
from nnsight_async.interleave.rows import Batch, Slab, Span
from nnsight_async.interleave.visit import Visit
from nnsight_async.interleave.waiting import Waiting

ByRun = Mapping[tuple[int, int], Told]


class Staged(Reaching):
    """Runs the blocks of one stage, each of which other stages run as well.

    Where a block is at a location of this stage, it is served, and what it was handed is told to the others; what it
    was handed elsewhere, it is handed here again when that is heard. So the block does on every stage what it does on
    the one whose turn it is: it *leads* from a location of this stage to the next of another, and *follows* otherwise.
    Writes land where the location is. What comes of the whole, the last stage reports.

    A forward pass with blocks is one message from each stage to each other. A stage hears those before it when its own
    part of the pass begins, and those behind it before the next pass over the same requests: vLLM schedules that when
    the tokens of this one are drawn. Nobody waits for a stage that waits for it.
    """

    plans = False

    def __init__(self, *args: Any, stages: Stages, wire: Callable[[Callable[[Any], Any]], Wire], **kwargs: Any) -> None:
        super().__init__(*args, stages=stages, wire=wire, **kwargs)
        self.closed: set[BlockRun] = set()
        """Runs that are over on the last stage, of which nothing is told any more."""
        self._thread = threading.get_ident()
        self._randomness = OwnRandomness()
        self._met: list[BlockRun] = []
        """Those of the pass that goes on."""
        self._heard: list[ByRun] = []
        self._told: list[Told] | None = None
        self._open: deque[list[BlockRun]] = deque()
        """Those of passes that later stages have still to tell of."""
        self._catching_up = False

    # -- driven by the worker --------------------------------------------------------------------------------------

    def open(self, runs: Iterable[BlockRun]) -> None:
        """A forward pass over rows of these runs is about to begin: hear of the stages before this one."""
        self._met = list(runs)
        self._heard = [self._hear(stage) for stage in range(self.stages.stage)]
        for run in self._met if self._heard else ():
            for heard in self._heard:
                told = heard[run.key, run.part]
                if told.stood and not run.ended and run.error is None:  # it was ended there, and would be here again
                    run.step += 1
                    self._fail(run, told)
                    self._report(run)
            self._coming[run] = deque(self._heard[0][run.key, run.part].entries)

    @property
    def unsaid(self) -> bool:
        """Whether a pass has begun of whose end the others have not been told."""
        return bool(self._met)

    def take_in(self) -> None:
        """The blocks stand at the beginning of the pass: let them go on as on the stages before this one."""
        for heard in self._heard:
            for run in self._met:
                told = heard[run.key, run.part]
                self._go_on(run, self._coming.setdefault(run, deque(told.entries)))
                self._compare(run, told)
        self._heard = []

    def pass_on(self) -> None:
        """This stage's part of the forward pass is over, and it is not the last: tell the others."""
        if self.stages.is_last:
            return
        for run in self._met:
            self.waiting.forget(run)
        for event in {*self.log.finish(), *self._collecting}:
            self.waiting.drop(event)
        self._collecting.clear()
        self._present = []
        self.sites.settle()
        if self._met:
            self._say(self._news())
            self._open.append(self._met)
            self._met = []

    def end_step(self) -> None:
        super().end_step()
        self._told = self._news()

    def speak(self) -> None:
        """The step is over on the last stage: tell the others."""
        if self._met:
            news = self._news() if self._told is None else self._told
            news = [told._replace(over=run.over) for told, run in zip(news, self._met, strict=True)]
            self.closed.update(run for run in self._met if run.over)
            self._say(news)
        self._met, self._told = [], None

    @property
    def behind(self) -> bool:
        """Whether later stages have still something to tell."""
        return bool(self._open)

    def catch_up(self, runs: Iterable[BlockRun]) -> None:
        """The next step of these runs is about to begin: hear of their last one on the stages behind this one."""
        wanted, later = set(runs), range(self.stages.stage + 1, self.stages.last + 1)
        needed = max((at + 1 for at, met in enumerate(self._open) if not wanted.isdisjoint(met)), default=0)
        for number in range(len(self._open)):
            if number >= needed and not all(map(self._wire.heard, later)):
                return
            self._catching_up = True
            self._finish(self._open.popleft(), [self._hear(stage) for stage in later])
            self._catching_up = False

    def _finish(self, met: Iterable[BlockRun], heard: list[ByRun]) -> None:
        for run in met:
            *middle, last = [each[run.key, run.part] for each in heard]
            for told in middle:
                self._go_on(run, self._coming.setdefault(run, deque(told.entries)))
                self._compare(run, told)
            if last.stood:
                self._fail(run, last)
            self._go_on(run, self._coming.setdefault(run, deque(last.entries)))
            self._settle(run)
            self._compare(run, last)
            self._report(run)
            if last.over:
                self.closed.add(run)
                if not run.over:
                    self.dismiss(run)

    def end(self, run: BlockRun) -> None:
        if self.stages.is_last:
            with self._turn(run, leads=True):
                super().end(run)
        else:  # what blocks do after the last step is to be seen on the last stage alone
            self.dismiss(run)
            self.log.forget(run)
            for met in self._open:
                if run in met:
                    met.remove(run)
        self.closed.discard(run)
        self._noted.pop(run, None)
        self._randomness.forget(run)

    def dismiss(self, run: BlockRun) -> None:
        with self._turn(run, leads=False):
            super().dismiss(run)

    def fire(self, event: Location, value: Any) -> Any:
        return super().fire(event, value) if threading.get_ident() == self._thread else value

    def refuse(self, event: Location, error: Exception) -> None:
        if threading.get_ident() == self._thread:
            super().refuse(event, error)

    # -- what was handed out elsewhere -------------------------------------------------------------------------------

    def _say(self, news: list[Told]) -> None:
        self.exchanges += 1
        self._wire.say(news, self.stages.others)

    def _hear(self, stage: int) -> ByRun:
        return {(told.key, told.part): told for told in self._wire.hear(stage)}

    def _news(self) -> list[Told]:
        return [
            Told(
                run.key,
                run.part,
                self._noted.pop(run, []),
                stands(run),
                run.over,
                None if run.error is None else Failed.of(run.error),
                run.stood,
            )
            for run in self._met
        ]

    def _go_on(self, run: BlockRun, coming: deque[Entry]) -> None:
        """Hand the block again what it was handed elsewhere, for as long as it asks for that."""
        while coming and not run.ended:
            match coming[0]:
                case Cached(number, event, value) if number < len(run.caches):
                    coming.popleft()
                    run.caches[number].store(event, value)
                case Visited(event) as visited if run.waits == event:
                    coming.popleft()
                    self._follow(run, visited)
                case _:
                    return

    def _follow(self, run: BlockRun, visited: Visited) -> None:
        event, rows, value = visited
        passed = self.order.after(event, run.clock)
        if passed is not None and passed > run.clock:
            run.clock = passed
        if event.operation:
            run.place = event
        slab, span = (Absent if isinstance(value, Failed) else Slab), Span(0, rows)
        visit = run.visit = Visit(event, slab(value, Batch(rows, False), event, [span]), span, run.gives_out)
        with self._turn(run, leads=False):
            run.resume()
            try:
                written = visit.changes()
                self.check_indices(event, visit.place, written)
                run.wrote = run.wrote or bool(written)
            except Exception as error:
                run.fail(error)
        if not self._catching_up:
            self.waiting.enlist(run)

    def _compare(self, run: BlockRun, told: Told) -> None:
        """After all that is told of a run, it stands here where it stands there, or it fails."""
        left = self._coming.pop(run)
        if run.ended or run.error is not None:
            return
        if told.error is not None:
            self._fail(run, told)
        elif left or stands(run) != told.stands:
            self._fail(run, told, diverged(run))

    def _fail(self, run: BlockRun, told: Told, error: BaseException | None = None) -> None:
        self.waiting.forget(run)
        with self._turn(run, leads=False):
            run.fail(error or (diverged(run) if told.error is None else told.error.error))
        run.stood = told.stood or run.stood

    @contextmanager
    def _turn(self, run: BlockRun, *, leads: bool) -> Generator[None]:
        before, self._leads = self._leads, leads
        try:
            with self._randomness.of(run, (run.key << 8 | run.part) % (1 << 62)):
                yield
        finally:
            self._leads = before

    # -- the turns -------------------------------------------------------------------------------------------------

    def _begin(self, run: BlockRun, span: Span) -> None:
        with self._turn(run, leads=self.stages.stage == 0):
            super()._begin(run, span)

    def _visit(self, run: BlockRun, visit: Visit) -> None:
        try:
            value = portable(visit.slab.original(visit.span))
        except Exception as error:
            value = Failed.of(error)
        self._note(run, Visited(visit.event, visit.span.rows, value))
        with self._turn(run, leads=True):
            super()._visit(run, visit)

    def _settle(self, run: BlockRun) -> None:
        with self._turn(run, leads=self.stages.is_last):
            super()._settle(run)

    def _store(self, run: BlockRun, cache: Cache, event: Location, slab: Slab) -> None:
        super()._store(run, cache, event, slab)
        if run.error is None:
            value = cache[f"{event.path}.{event.kind}"][-1]
            self._note(run, Cached(run.caches.index(cache), event, portable(value)))

    def _make_waiting(self) -> Waiting:
        return _WaitingHere(self)

    def is_here(self, event: Location, clock: int) -> bool:
        """Whether the next passage at `event` is on this stage."""
        return self.stages.of(event, self.order.after(event, clock)) == self.stages.stage

    # -- asked by blocks -------------------------------------------------------------------------------------------

    def check(self, event: Location) -> None:
        if event.operation and event.path in self.stages.cut:
            raise UnsupportedError(
                f"{expression(event.path)} goes over all stages of the pipeline, and none has its operations in one: "
                "read the modules that it calls"
            )
        super().check(event)

    def collect(self, run: BlockRun, cache: Cache, clock: int) -> None:
        if self._catching_up:  # this step is over here
            return
        clock = max(clock, self.stages.starts[self.stages.stage] - 1)
        for event in cache.events:
            if self.order.after(event, clock) is not None and self.is_here(event, clock):
                self._collecting.setdefault(event, []).append((run, cache))
                self.waiting.want(event)


class _WaitingHere(Waiting):
    """Blocks that wait for another stage are woken by what is heard of it."""

    def __init__(self, staged: Staged) -> None:
        super().__init__()
        self._staged = staged

    def enlist(self, run: BlockRun) -> None:
        if not isinstance(run.waits, Location) or self._staged.is_here(run.waits, run.clock):
            super().enlist(run)
