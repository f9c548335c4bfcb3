"""Runs that do the same in every step, one row each: what is kept of them from step to step is kept once for all."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

from nnsight_async.interleave.bundle import Bundle, Odd
from nnsight_async.interleave.plan import Read, Save
from nnsight_async.interleave.planned import PlannedSaves, piece, share
from nnsight_async.interleave.rows import Slab, Span
from nnsight_async.interleave.together import Places

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nnsight_async.interleave.block import BlockRun
    from nnsight_async.interleave.interleaver import Interleaver
    from nnsight_async.interleave.locations import Location
    from nnsight_async.interleave.plan import Phase, Stage
    from nnsight_async.interleave.rows import Batch

FOREVER = 1 << 60

Saved = list[tuple[Save, Any]]
"""Values in which each run has an item."""


class ReportTogether(Protocol):
    """Where what the runs of a crew have saved in a step goes."""

    def __call__(self, crew: Crew) -> None: ...


class Crew:
    """Runs whose plan reads and saves the same in each step, and has done so in the one before.

    The step of such a run, its position, what it has spent and how often it was reported follow from how many steps
    the crew has done since the run has joined. They are written to the run when it leaves.
    """

    def __init__(self, phase: Phase, each: int, lists: tuple[str, ...]) -> None:
        self.phase = phase
        self.each = each
        """Bytes that a run saves in a step."""
        self.lists = lists
        """Those that are appended to, in the order in which they were saved."""
        self.steps = 0
        self.joined: dict[BlockRun, int] = {}
        """All runs, and how many steps had been done when each came."""
        self._leaves: dict[BlockRun, int] = {}
        """How many steps will have been done when it does something else."""
        self._first = FOREVER
        """The least of those."""
        self.runs: list[BlockRun] = []
        """Those that have part in this step, in the order of their rows."""
        self._rows: list[int] = []
        self._requests: list[int] = []
        self.came: list[tuple[Stage, Saved]] = []
        """What has been done in this step."""
        self._places = Places([])
        self._listed: list[BlockRun] = []
        self.keys: list[int] = []
        self.bases: list[int] = []
        """Of each run in `runs`, the number of this step less those that the crew has done."""
        self.numbers: list[int] = []
        """The number of its next report, less those."""

    def join(self, run: BlockRun, steps: int) -> None:
        """Have `run`, for so many steps at most."""
        run.crew = self
        self.joined[run] = self.steps
        self._leaves[run] = self.steps + steps
        self._first = min(self._first, self.steps + steps)

    def leave(self, run: BlockRun) -> None:
        """Tell `run` what it has done, and let it go."""
        run.crew = None
        steps = self.steps - self.joined.pop(run)
        del self._leaves[run]
        run.step += steps
        run.position += steps
        run.reports += steps
        run.saves.spent += steps * self.each
        self._listed = []

    def retire(self) -> None:
        """Let those go that do something else in the step that begins."""
        if self.steps >= self._first:
            for run in [run for run, steps in self._leaves.items() if steps <= self.steps]:
                self.leave(run)
            self._first = min(self._leaves.values(), default=FOREVER)

    def takes(self, run: BlockRun, request: int, row: int, rows: int, position: int) -> bool:
        """Whether `run` does this step with the others: one row, and the next one. If not, it has left.

        `request`: the number of its request in the step.
        """
        if rows != 1 or position != self.position(run):
            self.leave(run)
            return False
        self.runs.append(run)
        self._rows.append(row)
        self._requests.append(request)
        return True

    def position(self, run: BlockRun) -> int:
        """That of the row of `run`."""
        return run.position + self.steps - self.joined[run]

    def begin(self) -> None:
        """All runs of the step are there."""
        if len(self.runs) != len(self.joined):
            here = set(self.runs)
            for run in [run for run in self.joined if run not in here]:
                self.leave(run)
        if self.runs != self._listed:
            self._listed = list(self.runs)
            self.keys = [run.key for run in self.runs]
            self.bases = [run.step + 1 - self.joined[run] for run in self.runs]
            self.numbers = [run.reports - self.joined[run] for run in self.runs]

    def begin_sampling(self) -> None:
        """From here on there is a row for each request."""
        self._rows = self._requests

    @property
    def spans(self) -> list[Span]:
        """Of the runs, in their order."""
        return [Span(row, row + 1, 0, self.position(run)) for run, row in zip(self.runs, self._rows, strict=True)]

    @property
    def requests(self) -> dict[BlockRun, int]:
        """The numbers of their requests in the step."""
        return dict(zip(self.runs, self._requests, strict=True))

    def do(self, stage: Stage, value: Any, rows: int) -> None:
        """What a stage waits for passes; raises anything where it cannot be done for all together."""
        if self._rows != self._places.starts:
            self._places = Places(self._rows)
        bundle = Bundle(value, rows, self._places)
        bundle.do(stage.deeds, _no_operand)
        self.came.append((stage, bundle.saved))
        if len(self.came) == len(self.phase.stages) and self._taken != self.each:
            self.came.pop()
            raise Odd

    @property
    def _taken(self) -> int:
        """Bytes that each run has saved in this step."""
        return sum(share(whole, len(self.runs)) for _, whole in self._saved)

    @property
    def _saved(self) -> Iterable[tuple[Save, Any]]:
        return chain.from_iterable(saved for _, saved in self.came)

    def end(self) -> None:
        """The step is over."""
        self.steps += bool(self.runs)
        self.runs, self._rows, self._requests, self.came = [], [], [], []

    def entries(self) -> Iterator[tuple[str, str, Any]]:
        """What was saved in this step, as entries of all runs together: name, operation, value."""
        for name in self.lists:
            if items := [whole for save, whole in self._saved if save.appends and save.name == name]:
                yield name, "extend", items
        for save, whole in self._saved:
            if not save.appends:
                yield save.name, "set", whole


class Crews:
    """All crews of a worker. There are none while nobody takes their reports."""

    def __init__(self, interleaver: Interleaver) -> None:
        self._interleaver = interleaver
        self._crews: dict[int, Crew] = {}
        self.waiting: dict[Location, list[tuple[Crew, Stage]]] = {}
        self.report: ReportTogether | None = None

    def __bool__(self) -> bool:
        """Whether any has part in this step."""
        return any(crew.runs for crew in self._crews.values())

    def retire(self) -> None:
        """A step is about to begin."""
        for crew in self._crews.values():
            crew.retire()

    def begin(self) -> None:
        """The runs of the step are known: have what they need reported."""
        for key, crew in list(self._crews.items()):
            crew.begin()
            if not crew.joined:
                del self._crews[key]
            elif crew.runs:
                for stage in crew.phase.stages:
                    self._interleaver.waiting.want(stage.event)
                    self.waiting.setdefault(stage.event, []).append((crew, stage))

    def begin_sampling(self) -> None:
        for crew in self._crews.values():
            crew.begin_sampling()

    def come(self, event: Location, value: Any, batch: Batch) -> None:
        """What some crews wait for passes."""
        for crew, stage in self.waiting.pop(event, ()):
            if not crew.runs:  # it was disbanded
                continue
            try:
                crew.do(stage, value, batch.rows)
            except Exception:  # of whatever kind: each run does alone what it can
                self._disband(crew, stage, Slab(value, batch, event, ()))

    def end_step(self) -> None:
        """Report what was saved; who still waits does so for nothing."""
        for crew, _ in chain.from_iterable(self.waiting.values()):
            if crew.runs:
                self._disband(crew)
        self.waiting.clear()
        for crew in self._crews.values():
            if crew.runs:
                assert self.report is not None
                self.report(crew)
            crew.end()

    def leave(self, run: BlockRun) -> None:
        """`run` goes with nobody any more, or is to know where it stands."""
        if run.crew is not None:
            run.crew.leave(run)

    def join(self, run: BlockRun) -> None:
        """A step of `run` is over: from the next on it goes with a crew, if what it does allows that."""
        planned = run.planned
        if self.report is None or planned is None or run.finished or run.error is not None or run.wrote:
            return
        if not run.alone:  # the others may write what it reads, and frames of a crew are of the first block
            return
        plan, saves = planned.plan, run.saves
        assert isinstance(saves, PlannedSaves)
        if run.step < 1 or plan.phase(run.step) is not plan.later or not _steady(plan.later):
            return
        stop, stride = plan.steps[1:]
        if stride != 1:
            return
        steps = FOREVER if stop is None else stop - 2 - run.step  # in its last, it says that it has ended
        if saves.last:
            steps = min(steps, (saves.budget - saves.spent) // saves.last)
        if steps > 0:
            crew = self._crews.get(id(plan.later))
            if crew is None:
                crew = self._crews[id(plan.later)] = Crew(plan.later, saves.last, saves.lists)
            if crew.each == saves.last:
                crew.join(run, steps)

    def _disband(self, crew: Crew, stage: Stage | None = None, slab: Slab | None = None) -> None:
        """Let every run do the rest of this step without the others. `stage` has come, and has not been done."""
        interleaver, runs, came = self._interleaver, crew.runs, crew.came
        spans, requests = dict(zip(runs, crew.spans, strict=True)), crew.requests
        for run in list(crew.joined):
            crew.leave(run)
        crew.end()
        interleaver.take_over(spans, requests)
        for save, whole in chain.from_iterable(saved for _, saved in came):
            for index, run in enumerate(runs):
                run.saves.put(save, piece(whole, index), share(whole, len(runs)))  # type: ignore[attr-defined]
        if stage is not None:
            assert slab is not None
            interleaver.turns.come([(stage, runs)], slab, spans)
        done = [stage, *(stage for stage, _ in came)]
        interleaver.turns.expect([stage for stage in crew.phase.stages if stage not in done], runs)


def _steady(phase: Phase) -> bool:
    """Whether nothing but reading and saving is done."""
    return (
        not phase.lists
        and bool(phase.stages)
        and all(isinstance(deed, (Read, Save)) for stage in phase.stages for deed in stage.deeds)
    )


def _no_operand(index: int) -> Any:
    raise Odd
