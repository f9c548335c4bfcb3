"""The blocks of the requests that this worker serves, from arrival to end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nnsight_async.capture.load import load
from nnsight_async.interleave.block import BlockRun
from nnsight_async.interleave.interleaver import Interleaver
from nnsight_async.interleave.locations import LOGITS, SAMPLES, Location
from nnsight_async.interleave.planned import PlannedSaves
from nnsight_async.interleave.rows import Batch, Span
from nnsight_async.runs.shipment import Shipment
from nnsight_async.tree.captures import capturing
from nnsight_async.tree.plans import plan_of
from nnsight_async.tree.references import resolved
from nnsight_async.worker.composition import numbers
from nnsight_async.worker.constants import Constants
from nnsight_async.worker.ops import Ops

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

    from nnsight_async.errors import AdapterError
    from nnsight_async.worker.adapters import Adapters
    from nnsight_async.worker.composition import Composition
    from nnsight_async.worker.outbox import Outbox
    from nnsight_async.worker.recycling import Recycling


class Edit(NamedTuple):
    """A block that many requests run. Each loads it for itself, so that nothing is shared through it."""

    payload: bytes
    rowwise: bool


class Blocks:
    """Blocks by vLLM request id: of each request its edits, and its own. Requests without any cost one dictionary
    look-up per step at most."""

    def __init__(
        self, interleaver: Interleaver, outbox: Outbox, device: torch.device, recycling: Recycling, adapters: Adapters
    ) -> None:
        self.interleaver = interleaver
        self.constants = Constants(device)
        self.ops = Ops()
        self._outbox = outbox
        self._recycling = recycling
        self._adapters = adapters
        self._device = device if device.type != "cpu" else None
        self._edits: dict[int, Edit] = {}
        self._edited_by: dict[BlockRun, int] = {}
        self._runs: dict[str, tuple[BlockRun, ...]] = {}
        self._operated: dict[str, tuple[int, int]] = {}
        """Requests that have operations: their keys, and which part the operations are."""
        self._rows: dict[BlockRun, int] = {}
        self._scheduled: dict[BlockRun, int] = {}
        """All runs of a step, those whose block has ended too, and their rows in what is sampled from."""
        self._requests = 0
        self._going = False
        """Whether a block has part in the step."""
        self.steps = 0
        """Forward passes that had a block."""
        self.planned = 0
        """Blocks whose steps are done together with those of others, without running them."""

    @property
    def runs(self) -> list[BlockRun]:
        """Those that have state here."""
        return [run for runs in self._runs.values() for run in runs]

    def stand_alone(self) -> list[BlockRun]:
        """Those that have state here, each of which knows where it stands: they leave their crews."""
        for run in self.runs:
            self.interleaver.crews.leave(run)
        return self.runs

    @property
    def idle(self) -> bool:
        """Whether no request here has a block, or operations."""
        return not self._runs and self.ops.idle

    @property
    def edits(self) -> int:
        """How many edits are installed."""
        return len(self._edits)

    def install(self, number: int, edit: Edit, timeout: float) -> None:
        """Have an edit, for requests that say that they run it; raises what loading its block does.

        One without a block has operations, which come with the requests.
        """
        if not edit.payload:
            self._edits[number] = edit
            return
        trial = BlockRun(0, self.interleaver, 0, timeout=timeout)
        self._prepare(trial, edit.payload)
        if trial.error is not None:
            raise trial.error
        self._edits[number] = edit

    def receive(self, digest: bytes, size: int, start: int, piece: bytes) -> None:
        """Take in a piece of a constant."""
        self.constants.receive(digest, size, start, piece)

    def clear(self, numbers: Sequence[int]) -> None:
        """End edits, in the requests that run them now too."""
        for number in numbers:
            self._edits.pop(number, None)
        for request, error in self.ops.clear(numbers):
            self._outbox.say(*self._operated[request], error, number=1)
        with torch.inference_mode():
            for run in [run for run, number in self._edited_by.items() if number in numbers and not run.over]:
                self.interleaver.dismiss(run)
        self._outbox.flush()

    def schedule(self, scheduled: SchedulerOutput) -> None:
        """Take in the requests that arrive with a step and let go of those that are over."""
        self._recycling.hand_over(scheduled, self._runs, self.ops.wild_requests)
        if scheduled.finished_req_ids:  # those that arrive are given the room that these had
            self.ops.part(scheduled.finished_req_ids)
            for request in self._operated.keys() & scheduled.finished_req_ids:
                del self._operated[request]
        for request in scheduled.scheduled_new_reqs:
            again = request.req_id in self._runs or request.req_id in self.ops  # it was preempted
            failure = self._adapters.provide(request, again=again)
            if not again and self._arrive(request, failure):
                self._recycling.arrive(request)
                self.interleaver.arrive(self._runs[request.req_id])
            if not again and request.req_id in self.ops.wild_requests:
                self._recycling.taint(request)
        self._outbox.flush()  # what was said of those that arrived, in one message
        if self._runs:
            self._part(scheduled.finished_req_ids)
        if scheduled.finished_req_ids:
            self._adapters.part(scheduled.finished_req_ids)

    def begin_step(self, step: Composition) -> None:
        """The forward pass over `step` is about to run."""
        self.ops.begin_step(step)
        if self.interleaver.crews:  # nothing was drawn in the last one
            self.interleaver.end_step()
        self._scheduled.clear()
        self._going = False
        if not self._runs:
            return
        spans: dict[BlockRun, Span] = {}
        self._rows.clear()
        count, crews = len(step.requests), self.interleaver.crews
        starts, computed = numbers(step.starts, count + 1), numbers(step.computed, count)
        stacked = False
        crews.retire()
        for index, request in enumerate(step.requests):
            runs = self._runs.get(request, ())
            stacked = stacked or len(runs) > 1
            for run in runs:
                start, stop, position = starts[index], starts[index + 1], computed[index]
                if run.crew is not None and run.crew.takes(run, index, start, stop - start, position):
                    continue
                self._scheduled[run] = index
                if not run.over or self.interleaver.remembers(run):
                    span = _span(run, start, stop, position)
                    if span.replayed or not run.over:
                        spans[run] = span
                        self._rows[run] = index
        self._requests = count
        self._going = bool(spans or crews)
        if self._going:
            self.interleaver.begin_step(spans, Batch(step.rows, self._requests > 1), stacked=stacked)

    def pad(self, rows: int) -> None:
        """The forward pass that has begun is over `rows` in all, padding included."""
        if self._going:
            self.interleaver.pad(rows)

    def begin_sampling(self) -> None:
        """The hidden states of the last tokens are about to become logits: one row per request."""
        if self._going and self.interleaver.waiting:  # for the logits, the samples, or a module that makes the logits
            spans = {run: Span(row, row + 1) for run, row in self._rows.items()}
            self.interleaver.begin_sampling(spans, Batch(self._requests, self._requests > 1))

    def logits(self, logits: Any) -> Any:
        logits = self._fire(LOGITS, logits)
        if self._scheduled or self.ops.wild:
            wrote = [row for run, row in self._scheduled.items() if run.wrote]
            make_drawable(logits, dict.fromkeys(sorted([*wrote, *self.ops.wild]) if self.ops.wild else wrote))
        return logits

    def samples(self, samples: Any) -> Any:
        return self._fire(SAMPLES, samples)

    def end_step(self) -> None:
        if self._going:
            self._going = False
            self.steps += 1
            self.interleaver.end_step()
            stopped = [run.key for run in self._rows if run.stopped]
            self._rows.clear()
            if stopped:
                self._end_beside(stopped)
            self._outbox.flush()

    def _end_beside(self, stopped: Sequence[int]) -> None:
        """A block that stops its request ends the generation for the others of the request."""
        for runs in self._runs.values():
            for run in runs:
                if run.key in stopped and not run.over:
                    self.interleaver.end(run)

    def _fire(self, event: Location, value: Any) -> Any:
        return self.interleaver.fire(event, value) if event in self.interleaver.waiting else value

    def _arrive(self, request: NewRequestData, failure: AdapterError | None) -> bool:
        """Take in a request; False if it has no block. `failure` is that of its adapter."""
        shipped = Shipment.of(request.sampling_params)
        if shipped is None:
            return False
        key, rows = _key(shipped.runs, request.req_id), _prompt_rows(request)
        runs = self._captures(key, rows, shipped)
        for number in (*shipped.edits, *(() if shipped.block is None else (None,))):
            run = BlockRun(key, self.interleaver, rows, shipped.budget, shipped.timeout, part=len(runs))
            runs.append(run)
            if number is None:
                self._begin(run, shipped.block)
            elif (edit := self._edits.get(number)) is None:
                self.interleaver.dismiss(run)  # cleared while the request was on its way
            else:
                self._edited_by[run], run.rowwise = number, edit.rowwise
                self._begin(run, edit.payload)
        for run in runs:
            run.alone = len(runs) == 1
        if self.interleaver.plans:
            self._plan(runs)
        part = len(runs)
        if shipped.ops is not None:
            self._operated[request.req_id] = key, part
            self._outbox.say(key, part, self.ops.arrive(request, shipped.ops, rows, self._edits))
            part += 1
        if shipped.adapter:
            self._outbox.say(key, part, failure)
        if runs or shipped.adapter:
            self._runs[request.req_id] = tuple(runs)
        return bool(runs)

    def _captures(self, key: int, rows: int, shipped: Shipment) -> list[BlockRun]:
        """What captures of a request: a block of its own, before all others."""
        if shipped.ops is None or not shipped.ops.captures:
            return []
        run = BlockRun(key, self.interleaver, rows, shipped.budget, shipped.timeout)
        self._capture(run, shipped.ops.captures)
        return [run]

    def _capture(self, run: BlockRun, captures: Sequence[tuple[str, str]]) -> None:
        program = capturing(captures, self.interleaver.model)
        with self.interleaver.apart():
            run.prepare(lambda: program)

    def _begin(self, run: BlockRun, block: bytes | None) -> None:
        self._prepare(run, block or b"")
        if run.error is not None:
            self._outbox.report(run)

    def _plan(self, runs: Iterable[BlockRun]) -> None:
        """Have what blocks do done together with others, if they are of the few forms of which that can be told.

        What is planned has its turn before any block that runs; so no block after one that runs is.
        """
        for run in runs:
            if run.over:
                continue
            planned = plan_of(run, self.interleaver)
            if planned is None:
                return
            run.planned, run.saves = planned, PlannedSaves(run.saves.budget)
            self.planned += 1

    def _prepare(self, run: BlockRun, block: bytes) -> None:
        model = self.interleaver.model
        with self.interleaver.apart():
            run.prepare(
                lambda: load(block, lambda reference: resolved(reference, model, run), self._device, self.constants.own)
            )

    def _part(self, finished: Iterable[str]) -> None:
        for request in sorted(finished):  # in one order on all ranks
            runs = self._runs.pop(request, None)
            if runs is not None:
                with torch.inference_mode():  # as in the steps, or their tensors could not be changed in place any more
                    for run in runs:
                        self._edited_by.pop(run, None)
                        self.interleaver.end(run)
                self._outbox.flush()
                self._recycling.part(request, runs)


def make_drawable(logits: torch.Tensor, rows: Iterable[int]) -> None:
    """Have the sampler find a token in these rows, in place.

    From a row of NaN vLLM's kernels draw ids that do not exist (0.33), and the look-up of such an id ends the engine.
    NaN becomes the lowest logit and infinity the highest.
    """
    limits = torch.finfo(logits.dtype)
    for start, stop in ranges(rows):
        logits[start:stop].nan_to_num_(limits.min, limits.max, -torch.inf)


def ranges(rows: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Ascending rows as ranges `[start, stop)`, which can be sliced without sending indices to the device."""
    start = stop = -1
    for row in rows:
        if row != stop:
            if stop > start:
                yield start, stop
            start = row
        stop = row + 1
    if stop > start:
        yield start, stop


def _key(keys: Sequence[int], request: str) -> int:
    """That of one of the requests that vLLM makes of one: it puts their number in front of the id (0.32, 0.33).

    For an id of any other form it is the first, whose frames then do not follow each other: that request fails alone.
    """
    number = request.partition("_")[0]
    return keys[int(number)] if len(keys) > 1 and number.isdecimal() and int(number) < len(keys) else keys[0]


def _span(run: BlockRun, start: int, stop: int, computed: int) -> Span:
    replayed = min(max(run.position - computed, 0), stop - start)
    return Span(start + replayed, stop, replayed, computed)


def _prompt_rows(request: NewRequestData) -> int:
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    return 0 if request.prompt_embeds is None else request.prompt_embeds.shape[0]
