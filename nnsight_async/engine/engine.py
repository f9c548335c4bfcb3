"""vLLM's `AsyncLLM` on an event loop of its own, and the runs that are on it."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Coroutine, Generator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import uvloop

from nnsight_async.engine.feed import Feed
from nnsight_async.engine.inbox import Inbox
from nnsight_async.errors import EngineClosedError, EngineDeadError, EngineStartError
from nnsight_async.runs.shipment import Shipment
from nnsight_async.tree.manifest import Manifest

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from nnsight_async.runs.frames import Frame
    from nnsight_async.runs.run import Run

log = logging.getLogger(__name__)
T = TypeVar("T")

HEARTBEAT = 1.0
"""Seconds between looks at whether the engine still lives, while a run goes."""

PATIENCE = 5.0
"""Seconds that something which ends at close has for it."""

_environment = threading.Lock()


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run may take: bytes of saved values, and seconds between two locations of its block."""

    save_bytes: int
    block_seconds: float


class Engine:
    """Owns `AsyncLLM`, the thread of its loop, and the inbox. All callers, on any loop or thread, share it."""

    def __init__(self, settings: dict[str, Any], limits: Limits, renames: Mapping[str, str]) -> None:
        self._settings = settings
        self._limits = limits
        self._renames = dict(renames)
        self._home = Path(tempfile.mkdtemp(prefix="nnsight_async-"))
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="nnsight-engine", daemon=True)
        self._runs: dict[int, Run] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._closing = False
        self._submitting = threading.Lock()
        self.llm: AsyncLLM
        self.manifest: Manifest

    # -- from any thread -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Build the engine; blocks for seconds. Raises `EngineStartError` with vLLM's reason."""
        self._thread.start()
        try:
            self.call(self._build()).result()
        except BaseException:
            self._end_loop()
            raise

    def call(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the engine's loop."""
        if self._closed:
            work.close()
            raise EngineClosedError("this model was closed; build a new one")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def submit(self, run: Run) -> None:
        """Start a run; returns at once."""
        if run.block is None:
            run.ledger.done = True
        else:
            limits = self._limits
            packed = Shipment(run.key, run.block.payload, limits.save_bytes, limits.block_seconds)
            packed.onto(run.request.params)
            self._keep_apart(run)
        with self._submitting:
            if self._closing or self._closed:
                raise EngineClosedError("this model was closed; build a new one")
            self._loop.call_soon_threadsafe(self._launch, run)

    def counts(self) -> Future[dict[str, Any]]:
        """What the client and the worker hold for runs now, and how often the worker's modules reported so far."""
        return self.call(self._count())

    def close(self) -> None:
        """End the engine's processes and its thread; runs that still go get `EngineClosedError`."""
        with self._submitting:
            if self._closing or self._closed:
                return
            self._closing = True
        try:
            self.call(self._shut_down()).result()
        finally:
            self._closed = True
            self._end_loop()

    @property
    def in_its_thread(self) -> bool:
        """Whether the caller is on the engine's own thread, where nothing may wait for the engine."""
        return threading.current_thread() is self._thread

    @property
    def closed(self) -> bool:
        return self._closed

    # -- on the engine's loop --------------------------------------------------------------------------------------

    async def _build(self) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._inbox = Inbox(f"ipc://{self._home}/inbox", self._deliver)
        try:
            with _environment, _spawning(self._home):
                self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._settings))
            described: list[bytes] = await self.llm.collective_rpc("nnsight_describe")
            self.manifest = Manifest.decode(described[0])
            if self._renames:
                self.manifest = self.manifest.renamed(self._renames)
                await self.llm.collective_rpc("nnsight_rename", args=(self._renames,))
        except Exception as error:
            self._inbox.close()
            raise _start_error(error, self._home) from error
        self._receiving = self._loop.create_task(self._inbox.receive())

    def _launch(self, run: Run) -> None:
        if run.settled:  # cancelled before it was here
            return
        self._runs[run.key] = run
        task = self._loop.create_task(self._serve(run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _count(self) -> dict[str, Any]:
        worker: dict[str, Any] = (await self.llm.collective_rpc("nnsight_counts"))[0]
        return {"client_runs": len(self._runs), "client_tasks": len(self._tasks), **worker}

    async def _serve(self, run: Run) -> None:
        """See one run to its end. Never cancelled: a request that vLLM has half taken in must still be aborted."""
        over = asyncio.Event()
        run.when_settled(lambda: self._from_outside(over.set))
        feed = Feed(run, lambda error: run.fail(self._failure(error)))
        try:
            await feed.open(self.llm)
            await self._end_of(run, over)
            await feed.close()
        except Exception as error:
            run.fail(self._failure(error))
        finally:
            self._runs.pop(run.key, None)

    async def _end_of(self, run: Run, over: asyncio.Event) -> None:
        while not over.is_set():
            try:
                async with asyncio.timeout(HEARTBEAT):
                    await over.wait()
            except TimeoutError:
                if self.llm.errored:
                    run.fail(self._failure(self.llm.dead_error))

    def _from_outside(self, function: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(function)

    def _deliver(self, frame: Frame) -> None:
        run = self._runs.get(frame.key)
        if run is not None:
            try:
                run.feed_frame(frame)
            except Exception as error:  # whatever one run's frame does, the others' come after it
                run.fail(error)

    def _failure(self, error: BaseException) -> BaseException:
        from vllm.v1.engine.exceptions import EngineDeadError as Dead

        if isinstance(error, Dead):
            return EngineDeadError("the engine's processes have ended; close this model and build a new one")
        return error

    def _keep_apart(self, run: Run) -> None:
        """A run with a block neither reads cached prefixes nor leaves its own for others."""
        if self._settings.get("enable_prefix_caching"):
            run.request.params.skip_reading_prefix_cache = True
            run.request.prompt["cache_salt"] = f"nnsight-{os.getpid()}-{run.key}"

    async def _shut_down(self) -> None:
        for run in list(self._runs.values()):
            run.fail(EngineClosedError("the model was closed while this run was going"))
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=PATIENCE)
        self._receiving.cancel()
        await asyncio.wait([self._receiving])
        self._inbox.close()
        self.llm.shutdown()
        _end_sockets(self.llm.engine_core)
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=PATIENCE)

    def _end_loop(self) -> None:
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)
        if not self._thread.is_alive():
            self._loop.close()
        shutil.rmtree(self._home, ignore_errors=True)


def _end_sockets(client: Any) -> None:
    """vLLM closes its sockets and leaves their context, which warns when it is collected (0.32, 0.33)."""
    with suppress(AttributeError):  # tidiness, not worth failing to close
        for socket in list(client.ctx._sockets):  # none as a rule; the context would wait for it for ever
            socket.close(linger=0)
        client.resources.ctx.term()


def _start_error(error: Exception, home: Path) -> Exception:
    words = home / "last_words"
    if words.is_file():
        return EngineStartError(f"the engine did not start: {words.read_text()}")
    if isinstance(error, (ValueError, TypeError, OSError, NotImplementedError)):
        return error
    return EngineStartError(f"the engine did not start: {error}")


@contextmanager
def _spawning(home: Path) -> Generator[None]:
    """The environment in which vLLM starts its processes."""
    ours = {"NNSIGHT_ASYNC_HOME": str(home), "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
