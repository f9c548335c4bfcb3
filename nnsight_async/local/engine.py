"""A model of transformers on a thread of its own, and the runs that are on it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from nnsight_async.errors import EngineClosedError
from nnsight_async.interleave.interleaver import Limits
from nnsight_async.interleave.setting import Setting
from nnsight_async.local.barrier import MeetingPlace
from nnsight_async.local.batch import Batch
from nnsight_async.local.blocks import Blocks, LocalTracer, LocalView
from nnsight_async.local.member import Member
from nnsight_async.local.prompts import tokenized
from nnsight_async.local.slab import PaddedSlab, experts_of
from nnsight_async.local.watchdog import ThreadWatchdog
from nnsight_async.runs.chosen import InstalledEdits
from nnsight_async.runs.history import Buffer
from nnsight_async.tree.envoy import Envoy
from nnsight_async.tree.passes import aliases_of, order_of

if TYPE_CHECKING:
    from nnsight_async.local.barrier import Meeting
    from nnsight_async.local.loading import Loaded
    from nnsight_async.runs.edit import Installed
    from nnsight_async.runs.history import SlowConsumers
    from nnsight_async.runs.run import Run
    from nnsight_async.tree.manifest import Manifest

T = TypeVar("T")

CLOSED = "this model was closed; build a new one"
PATIENCE = 5.0
"""Seconds that a step has to end at close."""


class RunLimits(NamedTuple):
    """What one run may take: bytes of saved values and of those that wait for readers, seconds of a block's turn."""

    save_bytes: int
    buffered_bytes: int
    slow_consumers: SlowConsumers
    block_seconds: float


class LocalEngine:
    """Takes runs from any thread. Those that come together make a batch; batches take turns, a step each."""

    def __init__(self, loaded: Loaded, manifest: Manifest, limits: RunLimits) -> None:
        self.loaded = loaded
        self.manifest = manifest
        self.edits = InstalledEdits()
        self._limits = limits
        self._vocabulary = loaded.vocabulary
        self._blocks = Blocks(loaded.device, limits.save_bytes, limits.block_seconds)
        experts = experts_of(loaded.model)
        slab = partial(PaddedSlab, experts=experts)
        setting = Setting(slab, LocalTracer, ThreadWatchdog, preempts=False, own_process=False)
        self._interleaver = self._blocks.interleaver = MeetingPlace(
            loaded.model,
            order_of(manifest),
            self._blocks.report,
            LocalView(Envoy(manifest)),
            aliases_of(manifest),
            Limits(self._vocabulary, loaded.positions),
            setting,
        )
        self._interleaver.experts = experts
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._batches: list[tuple[Batch, Sequence[Member]]] = []
        self._submitting = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="nnsight-local", daemon=True)
        self._thread.start()

    # -- from any thread -------------------------------------------------------------------------------------------

    def submit(self, runs: Sequence[Run]) -> None:
        """Start runs, as one batch; returns at once."""
        for run in runs:
            run.model = self.loaded.name
            run.ride(self.edits.chosen(run.request.edits))
            run.buffer = Buffer(self._limits.buffered_bytes, self._limits.slow_consumers)
        self._put(lambda: self._arrive(runs))

    def install(self, edit: Installed) -> None:
        """Have runs that are submitted from here on run `edit`; raises what loading it does."""
        self.edits.check_name(edit.name)
        self.call(lambda: self._blocks.check(edit.block)).result()
        self.edits.add(edit)

    def clear(self, numbers: Iterable[int] | None) -> Future[None]:
        """End edits (None: all), for runs that go on too."""
        removed = self.edits.remove(numbers)
        return self.call(lambda: self._blocks.clear(removed))

    def counts(self) -> Future[dict[str, Any]]:
        """What runs hold now."""
        return self.call(self._count)

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Have something done between two steps."""
        done: Future[T] = Future()

        def do() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        self._put(do)
        return done

    def close(self) -> None:
        """End the thread; runs that still go get `EngineClosedError`."""
        with self._submitting:
            if self._closing:
                return
            self._closing = True
            self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(PATIENCE)

    def _put(self, work: Callable[[], None]) -> None:
        with self._submitting:
            if self._closing:
                raise EngineClosedError(CLOSED)
            self._queue.put(work)

    # -- on the model's thread -------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            while not (self._batches and self._queue.empty()):
                work = self._queue.get()
                if work is None:
                    self._end()
                    return
                work()
                del work  # it knows the runs, and whoever waits for them may let go of them
            self._step_all()

    def _step_all(self) -> None:
        for batch, members in list(self._batches):
            self._step(batch, members)

    def _arrive(self, runs: Sequence[Run]) -> None:
        members: list[Member] = []
        meetings: dict[str, Meeting] = {}
        for run in runs:
            try:
                if not run.settled:
                    members.append(self._member(run, meetings))
            except Exception as error:
                run.fail(error)
        alone = [member for member in members if member.prompt.beside]
        together = [member for member in members if not member.prompt.beside]
        for group in (together, *([member] for member in alone)):
            if group:
                model = cast("Any", self.loaded.model)
                self._batches.append((Batch(model, group, self._interleaver, self.loaded.device), group))

    def _member(self, run: Run, meetings: dict[str, Meeting]) -> Member:
        prompt = tokenized(run.request.prompt, self.loaded.tokenizer, self._vocabulary)
        blocks = self._blocks.arrive(run, len(prompt.ids), meetings)
        return Member(run, prompt, blocks, self.loaded.tokenizer, self.loaded.ends, self.loaded.device)

    def _step(self, batch: Batch, members: Sequence[Member]) -> None:
        gone = [member for member in members if member.run.settled and not member.over]
        for member in gone:  # cancelled, or failed
            member.over = True
            self._blocks.part(member.run, member.blocks)
        going = [member for member in members if not member.over]
        try:
            if going:
                batch.step()
        except Exception as error:
            for member in going:  # before their blocks say that something did not come
                member.over = True
                member.run.fail(error)
            self._interleaver.end_step()
        for member in going:
            if member.over:
                self._blocks.part(member.run, member.blocks)
        if batch.over:
            self._batches.remove((batch, members))

    def _count(self) -> dict[str, Any]:
        held = self._interleaver
        return {
            "client_runs": sum(len(members) for _, members in self._batches),
            "client_tasks": self._queue.qsize(),
            "runs": self._blocks.runs,
            "edits": len(self.edits.installed),
            "waiting": len(held.waiting),
            "entered": held.sites.entered,
            "watched": held.sites.inside.watched,
            "reports": held.sites.reports,
        }

    def _end(self) -> None:
        for _, members in self._batches:
            for member in members:
                member.run.fail(EngineClosedError("the model was closed while this run was going"))
        self._batches.clear()
        self._interleaver.watchdog.close()
