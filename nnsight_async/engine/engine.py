"""vLLM's `AsyncLLM` on an event loop of its own, and the runs that are on it."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import uvloop

from nnsight_async.engine.adapters import Adapters
from nnsight_async.engine.constants import Constants
from nnsight_async.engine.edits import Edits
from nnsight_async.engine.feed import Feed
from nnsight_async.engine.foreign import Foreign, ForeignRequests
from nnsight_async.engine.home import make_home
from nnsight_async.engine.inbox import Inbox
from nnsight_async.engine.op_sites import Sites
from nnsight_async.engine.overdue import Overdue
from nnsight_async.engine.prefixes import Prefixes
from nnsight_async.engine.settings import model_name
from nnsight_async.engine.start import dead_error, start_error, start_vllm
from nnsight_async.errors import EngineClosedError, NNsightError
from nnsight_async.runs import failures
from nnsight_async.runs.facts import outcome
from nnsight_async.runs.history import Buffer, SlowConsumers
from nnsight_async.runs.ledger import lost
from nnsight_async.runs.ops import ShippedOps
from nnsight_async.runs.shipment import Shipment
from nnsight_async.tree.manifest import Manifest
from nnsight_async.tree.taps import resolve
from nnsight_async.worker import last_words, processes

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from nnsight_async.interleave.locations import Location
    from nnsight_async.runs.frames import Frame
    from nnsight_async.runs.run import Run
    from nnsight_async.runs.unread import Unread

T = TypeVar("T")

log = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds that something which ends at close has for it."""

ANSWER = 1.0
"""Seconds that a worker has to say its counts to who must not wait for long."""

COUNTED = ("started", "finished", "failed", "cancelled", "aborted", "late_frames", "dropped_steps")

CLOSED = "this model was closed; build a new one"


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run may take, and what blocks leave in the worker.

    Attributes:
        save_bytes: bytes of saved values.
        block_seconds: seconds between two locations of a block.
        buffered_bytes: bytes of saved values that wait for those who read them step by step.
        slow_consumers: what becomes of the run when there are more.
        constant_bytes: bytes of constants that stay in the worker though no run uses them now.
    """

    save_bytes: int
    block_seconds: float
    buffered_bytes: int
    slow_consumers: SlowConsumers
    constant_bytes: int


class Engine:
    """Owns `AsyncLLM`, the thread of its loop, and the inbox. All callers, on any loop or thread, share it."""

    def __init__(
        self,
        settings: dict[str, Any],
        limits: Limits,
        renames: Mapping[str, str],
        taps: Sequence[str] = (),
        op_sites: Sequence[str] = (),
    ) -> None:
        self.name = model_name(settings)
        self._settings = settings
        self._limits = limits
        self._renames = dict(renames)
        self._tapped = taps
        self.taps: tuple[Location, ...] = ()
        """Where blocks may look, if not everywhere."""
        self._sites = Sites(op_sites, eager=settings["enforce_eager"])
        self._home = make_home()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="nnsight-engine", daemon=True)
        self._runs: dict[int, Run | Foreign] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._closing = False
        self._tally: dict[str, int] = dict.fromkeys(COUNTED, 0)
        self._submitting = threading.Lock()
        self._building: Future[None] = Future()
        self._reading: Future[dict[str, Any]] | None = None
        self._of_worker: dict[str, Any] = {}
        self._constants = Constants(self._ask, limits.constant_bytes)
        self.adapters = Adapters(self._ask, enabled=bool(settings.get("enable_lora")))
        self._prefixes = Prefixes(bool(settings.get("enable_prefix_caching")))
        self.edits = Edits(self._ask, self._constants, limits.block_seconds, self._sites)
        self.llm: AsyncLLM
        self.manifest: Manifest

    # -- from any thread -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Build the engine; blocks for seconds. Raises `EngineStartError` with vLLM's reason."""
        self._thread.start()
        self._building = self.call(self._build())
        try:
            self._building.result()
        except BaseException:
            self.close()
            raise

    def call(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the engine's loop."""
        if self._closing:
            work.close()
            raise EngineClosedError(CLOSED)
        return asyncio.run_coroutine_threadsafe(self._until_closed(work), self._loop)

    def submit(self, run: Run) -> None:
        """Start a run; returns at once."""
        run.model = self.name
        chosen = self.edits.chosen(run.request.edits)
        run.ride(chosen)
        if run.request.lora is not None:
            self.adapters.check(run.request.lora, run)
        if run.has_blocks or run.ops or run.request.lora is not None:
            self._sites.check(run.request.ops)
            limits = self._limits
            block = None if run.block is None else run.block.payload
            edits = tuple(edit.number for edit in run.edits)
            adapter, ops = run.request.lora is not None, ShippedOps.of(run.ops)
            shipment = Shipment(
                (run.key,), block, limits.save_bytes, limits.block_seconds, edits, adapter=adapter, ops=ops
            )
            shipment.onto(run.request.params)
            run.buffer = Buffer(limits.buffered_bytes, limits.slow_consumers)
            request = run.request
            request.prompt = self._prefixes.apart(
                request.prompt,
                request.params,
                run.key,
                chosen,
                block=run.block is not None or bool(run.request.ops),
                adapter=self.adapters.changes(request.lora),
            )
        with self._submitting:
            if self._closing:
                raise EngineClosedError(CLOSED)
            self._loop.call_soon_threadsafe(self._launch, run)

    def counts(self) -> Future[dict[str, Any]]:
        """What the client and the worker hold for runs now, and how often the worker's modules reported so far."""
        return self.call(self._count())

    def reading(self) -> dict[str, Any]:
        """`counts`, those of the worker as they were last if it does not answer quickly, and `up`."""
        with suppress(EngineClosedError):
            if self._reading is None or self._reading.done():
                self._reading = self.counts()
            wait({self._reading}, timeout=0 if self.in_its_thread else ANSWER)
        return {**self._here(), **self._of_worker, "up": int(not self._died.done())}

    def close(self) -> None:
        """End the engine's processes and its thread; runs that still go get `EngineClosedError`."""
        with self._submitting:
            if self._closing:
                return
            self._closing = True
        if not self._building.done():  # the start was interrupted, or the interpreter exits
            processes.kill(self._home)
            wait({self._building}, timeout=PATIENCE)
        try:
            if self._building.done():
                asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result()
        finally:
            self._end_loop()

    def check(self) -> None:
        """Raise `EngineDeadError` if the engine's processes have ended."""
        if self._died.done():
            raise dead_error(self._home)

    def when_dead(self, tell: Callable[[], object]) -> None:
        """Call `tell` when the engine's processes have ended and it was not closed. From the loop, and on it."""
        self._died.add_done_callback(lambda _: tell())

    @property
    def in_its_thread(self) -> bool:
        """Whether the caller is on the engine's own thread, where nothing may wait for the engine."""
        return threading.current_thread() is self._thread

    @property
    def closed(self) -> bool:
        return self._closed

    # -- on the engine's loop --------------------------------------------------------------------------------------

    async def _build(self) -> None:
        self._died: asyncio.Future[None] = self._loop.create_future()
        try:
            self._inbox = Inbox(self._home, self.name, self._deliver, self._moved)
            self._overdue = Overdue(self._runs, self._inbox, self._ask)
            self.llm = start_vllm(self._settings, self._home)
            last_words.clear(self._home)
            # It ends with an error when any process of the engine does (vLLM 0.32, 0.33).
            outputs: Any = self.llm.output_handler
            outputs.add_done_callback(self._die)
            ForeignRequests(
                self.llm, self.edits, self.adapters, self._runs, self._limits, self._prefixes, self._overdue.watch
            )
            self.manifest = Manifest.decode(await self._ask("nnsight_describe"))
            if self._renames:
                self.manifest = self.manifest.renamed(self._renames)
                await self._ask("nnsight_rename", self._renames)
            if self._tapped:
                await self._tap()
            self._sites.resolve(self.manifest)
            log.info("the engine has started", extra={"model": self.name})
        except Exception as error:
            raise start_error(error, self._home) from error

    async def _tap(self) -> None:
        self.taps = resolve(self._tapped, self.manifest)
        error = await self._ask("nnsight_tap", self.taps)
        if error is not None:
            raise failures.unpack(error)

    def _launch(self, run: Run) -> None:
        if run.settled:  # cancelled before it was here
            self._let_go_of_adapter(run)
            return
        self._runs[run.key] = run
        self._tally["started"] += 1
        self._overdue.watch()
        task = self._loop.create_task(self._serve(run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _count(self) -> dict[str, Any]:
        worker: dict[str, Any] = await self._ask("nnsight_counts")
        self._of_worker = worker
        return {**self._here(), **worker}

    def _here(self) -> dict[str, Any]:
        held = {"client_runs": len(self._runs), "client_tasks": len(self._tasks)}
        return {**held, **self._tally, **self._inbox.counts()}

    async def _ask(self, method: str, *args: Any) -> Any:
        """What the worker's `method` returns; `EngineDeadError` as soon as the engine has ended, when vLLM waits on."""
        answer = asyncio.ensure_future(self.llm.collective_rpc(method, args=args))
        await asyncio.wait({answer, self._died}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            raise dead_error(self._home)
        try:
            return next((said for said in answer.result() if said is not None), None)
        except Exception as error:
            raise self._failure(error) from None

    async def _until_closed(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except asyncio.CancelledError:
            if self._closing:
                raise EngineClosedError(CLOSED) from None
            raise

    async def _serve(self, run: Run) -> None:
        """See one run to its end. Never cancelled: a request that vLLM has half taken in must still be aborted."""
        over = asyncio.Event()
        run.when_settled(lambda: self._from_outside(over.set))
        feed = Feed(run, lambda error: run.fail(self._failure(error)))
        try:
            async with self._constants.on_hand(run.block.constants if run.block is not None else ()):
                if not run.settled:
                    await feed.open(self.llm)
                    await over.wait()
                    self._tally["aborted"] += await feed.close()
        except Exception as error:
            run.fail(self._failure(error))
        finally:
            self._runs.pop(run.key, None)
            self._tally[outcome(run)] += 1
            self._let_go_of_adapter(run)
            run.unload()
            self._tally["dropped_steps"] += run.buffer.dropped

    def _let_go_of_adapter(self, run: Run) -> None:
        if run.request.lora is not None:
            self.adapters.let_go(run.request.lora, run)

    def _die(self, _: object) -> None:
        """vLLM gives no more outputs: unless it was closed, it is dead, and so is every run."""
        if not self._closing:
            self._died.set_result(None)
            told = {"model": self.name, "open_runs": len(self._runs)}
            log.error("the engine's processes have ended; %d runs were open", len(self._runs), extra=told)
            for run in list(self._runs.values()):
                run.fail(dead_error(self._home))

    def _from_outside(self, function: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(function)

    def _deliver(self, frame: Frame | Unread) -> None:
        run = self._runs.get(frame.key)
        if run is None:
            self._tally["late_frames"] += 1
        else:
            if frame.error is not None and run.edits:
                self._prefixes.distrust()
            try:
                run.feed_frame(frame)
            except Exception as error:  # whatever one run's frame does, the others' come after it
                run.fail(error if isinstance(error, NNsightError) else lost(frame.step, repr(error)))

    def _moved(self) -> None:
        """The inbox has a new address."""
        self._telling = self._loop.create_task(self._overdue.send_here())

    def _failure(self, error: BaseException) -> BaseException:
        from vllm.v1.engine.exceptions import EngineDeadError as Dead

        return dead_error(self._home) if isinstance(error, Dead) or self._died.done() else error

    async def _shut_down(self) -> None:
        for run in list(self._runs.values()):
            run.fail(EngineClosedError("the model was closed while this run was going"))
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=PATIENCE)
        await self._end_vllm()
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=PATIENCE)

    async def _end_vllm(self) -> None:
        if hasattr(self, "_inbox"):
            await self._inbox.close()
        if hasattr(self, "llm"):
            self.llm.shutdown()
            _end_sockets(self.llm.engine_core)

    def _end_loop(self) -> None:
        self._closed = True
        log.info("the engine was closed", extra={"model": self.name})
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        if not self._thread.is_alive():
            self._loop.close()
        shutil.rmtree(self._home, ignore_errors=True)


def _end_sockets(client: Any) -> None:
    """vLLM closes its sockets and leaves their context, which warns when it is collected (0.32, 0.33)."""
    with suppress(AttributeError):  # tidiness, not worth failing to close
        for socket in list(client.ctx._sockets):  # none as a rule; the context would wait for it for ever
            socket.close(linger=0)
        client.resources.ctx.term()
