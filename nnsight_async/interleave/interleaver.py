"""Blocks and the forward pass, turn by turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from nnsight_async.errors import LocationError, ShapeError, SplitPromptError, UnreadableError
from nnsight_async.interleave.block import PATIENCE, BlockRun
from nnsight_async.interleave.cache import Cache
from nnsight_async.interleave.crews import Crews
from nnsight_async.interleave.locations import LOGITS, SAMPLES, Kind, Location, expression
from nnsight_async.interleave.modes import Modes
from nnsight_async.interleave.order import Order
from nnsight_async.interleave.planned import Turns
from nnsight_async.interleave.refusals import not_computed
from nnsight_async.interleave.rows import Batch, Slab, Span, Written
from nnsight_async.interleave.setting import Setting
from nnsight_async.interleave.shared import applicable, guarded, reference
from nnsight_async.interleave.sites import Sites
from nnsight_async.interleave.taps import Taps
from nnsight_async.interleave.visit import Visit
from nnsight_async.interleave.waiting import Waiting
from nnsight_async.interleave.writes import WriteLog


class Report(Protocol):
    """Where the state of a run goes at the end of each of its steps."""

    def __call__(self, run: BlockRun) -> None: ...


class Limits(NamedTuple):
    """How many token ids and positions the model knows."""

    vocabulary: int = 1 << 31
    positions: int = 1 << 31


class Interleaver:
    """Wakes blocks where they wait. One per worker; all of it runs on the thread of the forward pass."""

    plans = True
    """Whether steps of blocks of few forms are done for many runs together, without running the blocks."""

    def __init__(
        self,
        root: torch.nn.Module,
        order: Order,
        report: Report,
        model: Any = None,
        aliases: Mapping[str, str] | None = None,
        limits: Limits | None = None,
        setting: Setting | None = None,
    ) -> None:
        self.order = order
        self.setting = setting or Setting()
        self.model = model
        self.waiting = self._make_waiting()
        self.sites = self.waiting.sites = Sites(root, self)
        self.turns = Turns(self)
        self.crews = Crews(self)
        self._report = report
        self._aliases = aliases or {}
        self.events: dict[Location, Location] = {}
        self._present: list[BlockRun] = []
        self._stacked = False
        self._batch = Batch(0, False)
        self._spans: Mapping[BlockRun, Span] = {}
        self._taken_over: dict[BlockRun, int] = {}
        self.limits = limits or Limits()
        self.differentiable: bool | None = None
        """Whether the values of this step are part of a graph; None where they never are."""
        self.running = False
        """Whether a block has its turn: modules that it applies itself are not reported to other blocks."""
        self.log = WriteLog()
        self.modes = Modes.now()
        """Of the forward pass, as they are before blocks have their turns."""
        self._collecting: dict[Location, list[tuple[BlockRun, Cache]]] = {}
        self.watchdog = self.setting.watchdog()
        self.taps: Taps | None = None
        """Where blocks may look, if not everywhere."""
        self.exchanges = 0
        """How often other ranks were told what blocks have done."""

    # -- driven by the worker --------------------------------------------------------------------------------------

    def begin_step(self, spans: Mapping[BlockRun, Span], batch: Batch, *, stacked: bool = False) -> None:
        """A forward pass over `batch` begins; `spans` says where the rows of each live run lie in it.

        `stacked`: some runs are of the same request, and have the same rows.
        """
        if self._present:
            self.end_step()
        if spans or self.crews:
            self.sites.stay()
        self._stacked = stacked
        self._batch, self._spans = batch, spans
        if spans:
            self.modes = Modes.now()
        for run, span in spans.items():
            if span.replayed:
                for event in self.log.replay(run, span):
                    self.waiting.want(event)
            if span.rows and not run.over:
                for cache in run.caches:
                    self.collect(run, cache, -1)
                self._begin(run, span)
        self.turns.wait()
        self.crews.begin()

    def take_over(self, spans: Mapping[BlockRun, Span], requests: Mapping[BlockRun, int]) -> None:
        """In the middle of a step, runs leave their crew; `requests`: the numbers of theirs."""
        self.modes = Modes.now()
        self._spans = {**self._spans, **spans}
        self._taken_over.update(requests)
        for run, span in spans.items():
            self._start(run, span)
            self.turns.prepare(run)

    @property
    def looks(self) -> bool:
        """Whether something is wanted of the model's own forward pass."""
        return not all(map(self.order.late, self.waiting))

    @property
    def calls(self) -> bool:
        """Whether blocks run in this forward pass, which may call modules."""
        return not self.plans or any(self.waiting.values())

    @property
    def only_reads(self) -> bool:
        """Whether what is done in this forward pass can be done after it."""
        return not (self.calls or self.log.replays_now or self._collecting or self.turns.changes)

    def pad(self, rows: int) -> None:
        """The forward pass is over `rows` in all."""
        self._batch.rows = rows

    def share(self) -> None:
        """The tensors of this pass hold other rows than those of the runs: those of earlier steps, in its padding."""
        self._batch.shared = True

    def begin_sampling(self, spans: Mapping[BlockRun, Span], batch: Batch) -> None:
        """From here on, values have one row per request instead of one per token."""
        taken_over = {run: Span(row, row + 1) for run, row in self._taken_over.items()}
        self._batch, self._spans = batch, {**spans, **taken_over}
        self.crews.begin_sampling()

    def fire(self, event: Location, value: Any) -> Any:
        """The forward pass is at `event` with `value`; returns what it goes on with."""
        if self.running:
            return value
        if event in self.crews.waiting and self._for_crews(event):
            self.waiting.leave(event)
            self.crews.come(event, value, self._batch)
            return value
        self.modes = Modes.now()
        runs = self.waiting.leave(event)
        replaying = self.log.replaying(event)
        rounds = self._rounds(runs) if self._stacked else [runs]
        slab = self._slab(value, event, rounds[0])
        for run in replaying:
            self._replay(run, event, slab)
        wrote: list[BlockRun] = [*replaying]
        for waiting in self.turns.rounds(event):
            wrote += self.turns.come(waiting, slab, self._spans)
            if self._stacked:
                value = self._written(slab, (), wrote)
                slab = self._slab(value, event, rounds[0], before=slab)
        self.crews.come(event, slab.value, self._batch)
        value = self._let_visit(rounds[0], event, slab, wrote)
        for others in rounds[1:]:
            slab = self._slab(value, event, others, before=slab)
            value = self._let_visit(others, event, slab)
        collecting = self._collecting.get(event, ())
        for run, cache in collecting:
            self._store(run, cache, event, slab)
        if collecting or replaying:
            self.waiting.want(event)
        return value

    def _for_crews(self, event: Location) -> bool:
        """Whether nobody else waits for `event`."""
        others = self.waiting[event], self.turns.waiting.get(event), self.log.replaying(event)
        return not any(others) and event not in self._collecting

    def _slab(self, value: Any, event: Location, runs: Iterable[BlockRun], *, before: Slab | None = None) -> Slab:
        return self.setting.slab(value, self._batch, event, [self._spans[run] for run in runs], before=before)

    def _rounds(self, runs: list[BlockRun]) -> list[list[BlockRun]]:
        """Runs of the same request one after the other: each sees what those before it have written."""
        rounds: list[list[BlockRun]] = [[]]
        before: Counter[int] = Counter()
        for run in sorted(runs, key=_part):
            number = before[self._spans[run].start]
            before[self._spans[run].start] += 1
            rounds += [[] for _ in range(number + 1 - len(rounds))]
            rounds[number].append(run)
        return rounds

    def _let_visit(self, runs: list[BlockRun], event: Location, slab: Slab, replaying: Iterable[BlockRun] = ()) -> Any:
        for run in runs:
            self._visit(run, Visit(event, slab, self._spans[run], run.gives_out))
        return self._written(slab, runs, replaying)

    def refuse(self, event: Location, error: Exception) -> None:
        """What is called in the forward pass now turns out not to have `event`."""
        if not self.running:
            self.modes = Modes.now()
            for run in self.waiting.leave(event):
                run.throw(error)
                self.waiting.enlist(run)

    def end_step(self) -> None:
        """The forward pass and the sampling are over."""
        if self._present:
            self.modes = Modes.now()
        for event in {*self.log.finish(), *self._collecting}:
            self.waiting.drop(event)
        self._collecting.clear()
        self.crews.end_step()
        self.turns.settle()
        for run in self._present:
            self._settle(run)
            self._report(run)
            self.crews.join(run)
        self._present = []
        self._taken_over.clear()
        self.sites.settle()

    def end(self, run: BlockRun) -> None:
        """The request of `run` is over."""
        self.modes = Modes.now()
        self.crews.leave(run)
        self.turns.forget()
        self.waiting.forget(run)
        run.end()
        self.waiting.forget(run)
        self.log.forget(run)
        self._report(run)

    def dismiss(self, run: BlockRun) -> None:
        """`run` is to do no more, though its request goes on. What it wrote is repeated if that is preempted."""
        self.modes = Modes.now()
        self.crews.leave(run)
        self.waiting.forget(run)
        run.dismiss()
        self._report(run)

    def arrive(self, runs: Iterable[BlockRun]) -> None:
        """The blocks of requests that are new have been loaded, or have failed."""

    def apart(self) -> AbstractContextManager[None]:
        """Code of blocks runs, outside of their turns."""
        return nullcontext()

    def remembers(self, run: BlockRun) -> bool:
        """Whether writes of `run` would have to be repeated if it were preempted."""
        return self.log.holds(run)

    def collect(self, run: BlockRun, cache: Cache, clock: int) -> None:
        """Have `cache` filled in this step with what passes after `clock`."""
        for event in cache.events:
            if self.order.after(event, clock) is not None:
                self._collecting.setdefault(event, []).append((run, cache))
                self.waiting.want(event)

    # -- asked by blocks -------------------------------------------------------------------------------------------

    def event(self, location: Location) -> Location:
        """The passage at which `location` is served; a module with two paths is served under the first."""
        event = self.events.get(location)
        if event is None:
            path, kind, operation = location
            kind = "inputs" if kind == "input" else kind
            event = self.events[location] = Location(self._aliases.get(path, path), kind, operation)
        return event

    def check(self, event: Location) -> None:
        """Raise what says why a block cannot wait for `event`, where that is known."""
        if self.taps is not None:
            self.taps.check(event)
        if event.operation:
            self.sites.check(event)

    def events_of(self, modules: Iterable[Any] | None, include_inputs: bool) -> list[Location]:
        """The events at which the modules (or their paths; None: all that are called) return, or are entered too."""
        called = self.order.called()
        chosen = called if modules is None else [self._path(module) for module in modules]
        if silent := next((path for path in chosen if called and path not in called), None):
            raise UnreadableError(f"{expression(silent)} cannot be read: it is not called in a forward pass")
        kinds: tuple[Kind, ...] = ("inputs", "output") if include_inputs else ("output",)
        events = list(dict.fromkeys(self.event(Location(path, kind)) for path in chosen for kind in kinds))
        if self.taps is None:
            return events
        if modules is None:
            return [event for event in events if self.taps.has(event)]
        for event in events:
            self.taps.check(event)
        return events

    def _path(self, module: Any) -> str:
        path = module if isinstance(module, str) else reference(module)
        if path is None or self.sites.module(path) is None:
            raise LocationError(f"the model has no module {module!r}")
        return path

    def module(self, path: str) -> torch.nn.Module:
        module = self.sites.module(path)
        if module is None:
            raise LocationError(f"the model has no module {path!r}")
        return module

    def lend(self, path: str, name: str, value: Any) -> Any:
        """An attribute of a real module as a block may have it."""
        return guarded(value, name, expression(path))

    def call(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = applicable(self.module(path), path)
        return module(*map(self._real, args), **{name: self._real(value) for name, value in kwargs.items()})

    def _real(self, value: Any) -> Any:
        """The module that a path of the tree stands for; anything else as it is."""
        path = reference(value)
        return value if path is None else self.module(path)

    def _make_waiting(self) -> Waiting:
        return Waiting()

    # -- the turns -------------------------------------------------------------------------------------------------

    def _begin(self, run: BlockRun, span: Span) -> None:
        if run.step < 0 and run.planned is None:
            run.look_ahead()
        if run.step < 0 and ((span.position and not run.rowwise) or span.position + span.rows < run.prompt_rows):
            run.fail(_split(run, span))
        self._start(run, span)
        if run.planned is None:
            self.waiting.enlist(run)
        elif not run.finished:
            self.turns.begin(run)

    def _start(self, run: BlockRun, span: Span) -> None:
        run.position = span.position + span.replayed + span.rows
        self._present.append(run)
        run.begin()

    def _visit(self, run: BlockRun, visit: Visit) -> None:
        event = visit.event
        if run.coming is not None and run.coming > run.clock:
            run.clock = run.coming
        if event.operation:
            run.place = event
        run.visit = visit
        run.resume()
        self.commit(run, visit)
        self.waiting.enlist(run)

    def _replay(self, run: BlockRun, event: Location, slab: Slab) -> None:
        try:
            self.log.apply(run, event, slab)
        except Exception as error:  # no memory
            run.fail(error)

    def _store(self, run: BlockRun, cache: Cache, event: Location, slab: Slab) -> None:
        try:
            cache.store(event, slab.take_finished(self._spans[run]).value)
        except Exception as error:  # a value that cannot be narrowed to the run's rows
            run.fail(error)

    def commit(self, run: BlockRun, visit: Visit) -> None:
        try:
            written = visit.changes()
            if not written:
                return
            self.check_indices(visit.event, visit.place, written)
            visit.commit()
            run.wrote = True
            if self.repeats(visit.event):
                kept = [(path, rows.clone()) for path, rows in written]
                nth = self.order.passage(visit.event, run.clock)
                self.log.add(run, visit.event, visit.span, kept, nth=nth, in_place=visit.in_place)
        except Exception as error:  # a copy of another shape, an index out of range, no memory
            run.fail(error)

    def repeats(self, event: Location) -> bool:
        """Whether what is written at `event` may have to be written again."""
        return event.in_model and self.setting.preempts

    def check_indices(self, event: Location, place: object, written: Written) -> None:
        """Ids and positions that do not exist would end the engine in the look-up that they are for."""
        for _, rows in written:
            if rows.dtype in (torch.int32, torch.int64) and event != LOGITS and rows.numel():
                bound = self._bound(event)
                if int(rows.min()) < 0 or int(rows.max()) >= bound:
                    raise ShapeError(f"{place} takes whole numbers from 0 to {bound - 1}")

    def _bound(self, event: Location) -> int:
        if event == SAMPLES:
            return self.limits.vocabulary
        return getattr(self.module(event.path), "num_embeddings", self.limits.positions)

    def _written(self, slab: Slab, runs: Iterable[BlockRun], replaying: Iterable[BlockRun]) -> Any:
        before = slab.value
        try:
            return slab.finish()
        except Exception as error:  # out of memory: nothing is written, and the runs that wrote end
            wrote = (run for run in runs if run.visit is not None and run.visit.wrote)
            for run in {*wrote, *replaying}:
                self.waiting.forget(run)
                run.fail(error)
            return before

    def _settle(self, run: BlockRun) -> None:
        """At the end of a step nobody may wait for it any more."""
        for _ in range(PATIENCE):
            if run.finished or not isinstance(run.waits, Location):
                return
            self.waiting.forget(run)
            run.throw(not_computed(run))
            self.waiting.enlist(run)
        self.waiting.forget(run)
        run.kill()


def _part(run: BlockRun) -> int:
    return run.part


def _split(run: BlockRun, span: Span) -> SplitPromptError:
    return SplitPromptError(
        f"the scheduler ran rows {span.position} to {span.position + span.rows} of a prompt of {run.prompt_rows} "
        "tokens, and a block must see its prompt in one step; build the engine with enable_chunked_prefill=False (the "
        "default), or raise max_num_batched_tokens above the prompt's length"
    )
