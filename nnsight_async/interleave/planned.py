"""Blocks of few forms, each of whose steps is done for all requests together that run the same."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch

from nnsight_async.interleave.bundle import IN_PLACE, Bundle, Odd, Operands
from nnsight_async.interleave.plan import Change, Number, Read, Save, as_key
from nnsight_async.interleave.refusals import not_computed
from nnsight_async.interleave.saving import Entry, Saves, check, size, snapshot
from nnsight_async.interleave.together import Piece, Places
from nnsight_async.interleave.visit import Visit

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from nnsight_async.interleave.block import BlockRun
    from nnsight_async.interleave.interleaver import Interleaver
    from nnsight_async.interleave.locations import Location
    from nnsight_async.interleave.plan import Key, Phase, Stage
    from nnsight_async.interleave.rows import Slab, Span


class PlannedSaves(Saves):
    """What a plan saves in a step: values, or pieces of what several runs have together."""

    def __init__(self, budget: int) -> None:
        super().__init__(budget)
        self.items: dict[str, list[Any]] = {}
        """What has been appended to lists in this step."""
        self.begun: tuple[str, ...] = ()
        """Lists that were saved in this step."""
        self.ready: list[Entry] = []
        self.last = 0
        """Bytes that were saved in the step that was over last."""
        self._lists: dict[str, None] = {}
        """All lists, in the order in which they were saved."""
        self._appended = 0

    @property
    def lists(self) -> tuple[str, ...]:
        """The names of all lists, in the order in which they were saved."""
        return tuple(self._lists)

    @property
    def left(self) -> int:
        """Bytes that may still be put."""
        return self.budget - self.spent - self._pending

    def collect(self) -> list[Entry]:
        begun = [Entry(name, "set", self.items.pop(name, [])) for name in self.begun]
        entries = [Entry(name, "extend", self.items[name]) for name in self._lists if name in self.items]
        for name in self.begun:
            self._lists.pop(name, None)
            self._lists[name] = None
        entries += begun + self.ready
        self.begun, self.items, self.ready = (), {}, []
        self.last, self._pending, self._appended = self._pending + self._appended, 0, 0
        self.spent += self.last
        self._check_budget(self.spent)
        return entries

    def put(self, save: Save, value: Any, taken: int) -> None:
        """Take a value of so many bytes in; `SaveBudgetError` past the budget, for what is appended when it is sent."""
        if save.appends:
            self._appended += taken
            self.items.setdefault(save.name, []).append(value)
        else:
            self._check_budget(self.spent + self._pending + taken)
            self._pending += taken
            self.ready.append(Entry(save.name, "set", value))


Waiting = tuple["Stage", "list[BlockRun]"]


class Turns:
    """The runs of this step that have plans."""

    def __init__(self, interleaver: Interleaver) -> None:
        self._interleaver = interleaver
        self._groups: dict[tuple[int, int], tuple[Phase, list[BlockRun]]] = {}
        self.waiting: dict[Location, dict[int, list[Waiting]]] = {}
        """What is to be done where, by the part of the requests: what an earlier one has written, a later one sees."""
        self._operands: dict[tuple[int, int], Operands] = {}
        self._before: dict[tuple[int, int], Operands] = {}
        """Those of the step before, which has mostly had the same runs."""

    def begin(self, run: BlockRun) -> None:
        """A step of `run` begins."""
        phase = self.prepare(run)
        if phase.stages:
            key = run.part, id(phase)
            found = self._groups.get(key)
            if found is None:
                found = self._groups[key] = phase, []
            found[1].append(run)

    def prepare(self, run: BlockRun) -> Phase:
        """Have `run` say where it stands in a step that begins; returns what it does there."""
        planned = run.planned
        assert planned is not None
        phase = planned.plan.phase(run.step)
        run.saves.begun = phase.lists  # type: ignore[attr-defined]
        run.finished = run.step >= planned.last
        if run.finished:
            run.stood = []
        elif not run.stood:
            run.stood = [_place(run, planned.plan.line)]
        return phase

    def expect(self, stages: Iterable[Stage], runs: list[BlockRun]) -> None:
        """Have runs of one part wait for stages, whose events are reported already."""
        for stage in stages:
            self.waiting.setdefault(stage.event, {}).setdefault(runs[0].part, []).append((stage, runs))

    def wait(self) -> None:
        """All runs of the step have begun: have what they need reported."""
        for (part, _), (phase, runs) in sorted(self._groups.items(), key=_part):
            for stage in phase.stages:
                self._interleaver.waiting.want(stage.event)
                self.waiting.setdefault(stage.event, {}).setdefault(part, []).append((stage, runs))
        self._groups.clear()

    @property
    def changes(self) -> bool:
        """Whether anything that is waited for is to be changed."""
        waiting = chain.from_iterable(rounds.values() for rounds in self.waiting.values())
        return any(isinstance(deed, Change) for stage, _ in chain.from_iterable(waiting) for deed in stage.deeds)

    def rounds(self, event: Location) -> Iterable[list[Waiting]]:
        """Those who wait for what passes: one round after the other."""
        return self.waiting.pop(event, {}).values()

    def come(self, waiting: list[Waiting], slab: Slab, spans: Mapping[BlockRun, Span]) -> list[BlockRun]:
        """What was waited for passes; returns the runs that have written something."""
        wrote: list[BlockRun] = []
        for stage, runs in waiting:
            going = sorted(((spans[run], run) for run in runs if run.error is None), key=_start)
            for members in _alike(going):
                self._do(stage, members, slab)
            if any(isinstance(deed, Change) for deed in stage.deeds):
                wrote += runs
        return wrote

    def settle(self) -> None:
        """The step is over: what has not come does not come any more."""
        for event, rounds in self.waiting.items():
            self._interleaver.waiting.drop(event)
            for stage, runs in chain.from_iterable(rounds.values()):
                for run in runs:
                    if run.error is None:
                        first = next(deed for deed in stage.deeds if isinstance(deed, Read))
                        run.asked = first.asked
                        _fail(run, first.line, not_computed(run))
        self.waiting.clear()
        self._before, self._operands = self._operands, {}

    def forget(self) -> None:
        """A run is over: what it had is not to be kept until the next step."""
        self._before.clear()

    def _do(self, stage: Stage, members: list[tuple[Span, BlockRun]], slab: Slab) -> None:
        if not self._done(stage, members, slab):
            for span, run in members:
                self._alone(stage, span, run, slab)

    def _done(self, stage: Stage, members: list[tuple[Span, BlockRun]], slab: Slab) -> bool:
        """Whether it could be done together. Else each does alone what its block would, and raises what that would."""
        try:
            self._together(stage, members, slab)
        except Exception:
            return False
        return True

    # -- many at once ----------------------------------------------------------------------------------------------

    def _together(self, stage: Stage, members: list[tuple[Span, BlockRun]], slab: Slab) -> None:
        spans, runs = [span for span, _ in members], [run for _, run in members]
        places = Places([span.start for span in spans], spans[0].rows)
        bundle = Bundle(slab.value, slab.batch.rows, places)
        bundle.do(stage.deeds, partial(self._operand, (id(stage), spans[0].rows), runs))
        taken = [share(whole, len(runs)) for _, whole in bundle.saved]
        wanted = sum(each for each, (save, _) in zip(taken, bundle.saved, strict=True) if not save.appends)
        if any(wanted > run.saves.left for run in runs):  # type: ignore[attr-defined]
            raise Odd
        if bundle.changed:
            self._write(stage.event, bundle, members, slab)
        for each, (save, whole) in zip(taken, bundle.saved, strict=True):
            for index, run in enumerate(runs):
                run.saves.put(save, piece(whole, index), each)  # type: ignore[attr-defined]

    def _operand(self, key: tuple[int, int], runs: list[BlockRun], index: int) -> tuple[torch.Tensor, bool]:
        operands = self._operands.get(key)
        if operands is None:
            operands = self._operands[key] = self._before.get(key) or Operands()
        return operands.of(runs, index, [_operands(run)[index] for run in runs])

    def _write(self, event: Location, bundle: Bundle, members: list[tuple[Span, BlockRun]], slab: Slab) -> None:
        interleaver = self._interleaver
        changed = {path: bundle.written(path) for path in bundle.changed}
        flat = {path: tensor.flatten(0, 1) for path, tensor in changed.items()}
        interleaver.check_indices(event, event, list(flat.items()))
        for path, tensor in flat.items():
            for start, first, last in _neighbours([span for span, _ in members]):
                slab.put(start, [(path, tensor[first:last])])
        for _, run in members:
            run.wrote = True
        if interleaver.repeats(event):
            pieces = [(path, cast("Any", torch).unbind_copy(tensor)) for path, tensor in changed.items()]
            for index, (span, run) in enumerate(members):
                interleaver.log.add(run, event, span, [(path, rows[index]) for path, rows in pieces])

    # -- one alone -------------------------------------------------------------------------------------------------

    def _alone(self, stage: Stage, span: Span, run: BlockRun, slab: Slab) -> None:
        """As the block itself would."""
        visit = run.visit = Visit(stage.event, slab, span)
        readings: dict[int, Any] = {}
        line = stage.deeds[0].line
        try:
            for deed in stage.deeds:
                line = deed.line
                match deed:
                    case Read():
                        readings[deed.number] = visit.get() if deed.view is None else visit.see(deed.view, deed.asked)
                    case Save():
                        _save(run, deed, _at(readings[deed.reading.number], deed.keys))
                    case Change():
                        _change(run, deed, readings, visit)
        except Exception as error:
            _fail(run, line, error)
        rests = run.stood
        if run.error is None:
            run.stood = _next(run, stage)
        self._interleaver.commit(run, visit)  # what was changed before an error, too
        if run.error is None:
            run.stood = rests


def _fail(run: BlockRun, line: int, error: Exception) -> None:
    """End a run with an error that was raised for a line of its block."""
    run.fail(error.with_traceback(None))
    run.stood = [_place(run, line)]


def _place(run: BlockRun, line: int) -> tuple[str, int, str]:
    """A line of its block, as tracebacks say it."""
    assert run.planned is not None
    return run.planned.plan.filename, line, run.planned.plan.function


def _next(run: BlockRun, stage: Stage) -> list[tuple[str, int, str]]:
    """Where the block would wait after a stage."""
    assert run.planned is not None
    stages = run.planned.plan.phase(run.step).stages
    after = stages[stages.index(stage) + 1 :]
    return [_place(run, after[0].deeds[0].line)] if after else run.stood


def _operands(run: BlockRun) -> Sequence[torch.Tensor]:
    assert run.planned is not None
    return run.planned.operands


def _save(run: BlockRun, save: Save, value: Any) -> None:
    check(value, save.name)
    run.saves.put(save, snapshot(value), size(value))  # type: ignore[attr-defined]


def _change(run: BlockRun, change: Change, readings: dict[int, Any], visit: Visit) -> None:
    value = change.operand
    value = value.value if isinstance(value, Number) else _operands(run)[value]
    reading = readings[change.reading.number]
    if not change.keys:
        changed = IN_PLACE[change.sign](reading, value)
        view = change.reading.view
        visit.set(changed) if view is None else visit.show(view, changed, change.reading.asked)
        return
    *keys, last = change.keys
    holder = _at(reading, keys)
    key = as_key(last)
    holder[key] = IN_PLACE[change.sign](holder[key], value) if change.sign else value


def _at(value: Any, keys: Iterable[Key]) -> Any:
    for key in keys:
        value = value[as_key(key)]
    return value


def piece(whole: Any, index: int) -> Any:
    """What one run has of a value that all have together."""
    if isinstance(whole, torch.Tensor):
        return Piece(whole, index)
    if isinstance(whole, (list, tuple)):
        items: Any = whole
        return type(whole)([piece(item, index) for item in items])
    if isinstance(whole, dict):
        pairs: Any = whole
        return {key: piece(item, index) for key, item in pairs.items()}
    return whole


def share(whole: Any, runs: int) -> int:
    """The bytes that each run has of a value that all have together."""
    if isinstance(whole, torch.Tensor):
        return whole.nbytes // runs
    if isinstance(whole, (list, tuple)):
        return sum(share(item, runs) for item in cast("list[Any]", whole))
    if isinstance(whole, dict):
        return sum(share(item, runs) for item in cast("dict[Any, Any]", whole).values())
    return size(whole)


def _part(group: tuple[tuple[int, int], Any]) -> int:
    return group[0][0]


def _start(member: tuple[Span, BlockRun]) -> int:
    return member[0].start


def _alike(members: Sequence[tuple[Span, BlockRun]]) -> Iterable[list[tuple[Span, BlockRun]]]:
    """Those with as many rows each, together."""
    found: dict[int, list[tuple[Span, BlockRun]]] = {}
    for member in members:
        found.setdefault(member[0].rows, []).append(member)
    return found.values()


def _neighbours(spans: Sequence[Span]) -> Iterable[tuple[int, int, int]]:
    """Of ordered spans of as many rows each, those that follow each other: the row of the first, and from which to
    which of their own rows."""
    rows = spans[0].rows
    first = 0
    for index in range(1, len(spans) + 1):
        if index == len(spans) or spans[index].start != spans[index - 1].stop:
            yield spans[first].start, first * rows, index * rows
            first = index
