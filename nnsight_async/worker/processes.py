"""The processes that vLLM starts for an engine: what they begin with, what they leave, and how they end."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from multiprocessing import connection, parent_process, resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from nnsight_async.worker import last_words
from nnsight_async.worker.entries import around, require
from nnsight_async.worker.noise import hush_process

CORE = "vllm.v1.engine.core"
EXECUTOR = "vllm.v1.executor.multiproc_executor"
P = ParamSpec("P")
R = TypeVar("R")

PATIENCE = 5.0
"""Seconds that a process has to end by itself when the one that started it is gone."""


if last_words.HOME in os.environ:  # this is such a process, and vLLM is not imported yet
    hush_process()


class EngineProcess(SpawnProcess):
    """A process of vLLM's that leaves word of what it ended with, and that ends quickly and with its parent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.home = os.environ.get(last_words.HOME)

    def start(self) -> None:
        """Start it deaf to Ctrl-C, which is meant for the caller: an engine outlives the interrupt of one run."""
        resource_tracker.ensure_running()  # which would unblock the signal
        if self.home in _given_up:
            raise RuntimeError("the start of this engine was given up")
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        watch = threading.Thread(target=self._watch, name=f"nnsight-watch-{self.pid}", daemon=True)
        _watches[self] = watch
        watch.start()

    def run(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # forgets one that has come meanwhile
        os.setpgid(0, 0)  # vLLM will listen to the signal, but a terminal sends it to the group of the caller
        threading.Thread(target=_end_with_parent, name="nnsight-parent", daemon=True).start()
        status = 0
        try:
            _enter_core()
            _enter_workers()
            super().run()
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
        except Exception as error:
            status = 1
            hear()
            last_words.leave(last_words.words_of(error))
        _end(status)

    def _watch(self) -> None:
        killer = _killer(self)
        if killer:
            last_words.leave(f"the process {self.name} was ended by {signal.Signals(killer).name}", self.home)
        _watches.pop(self, None)


class EngineContext(SpawnContext):
    """The context of multiprocessing that vLLM is given."""

    Process = EngineProcess


_watches: dict[EngineProcess, threading.Thread] = {}
"""The processes that this one has started and that still go, and who waits for their ends."""

_given_up: set[str | None] = set()


@contextmanager
def entered(module: ModuleType) -> Generator[None]:
    """While it lasts, the processes that `module` of vLLM starts are ours.

    It asks for a context by the name `get_mp_context` (`vllm.v1.engine.utils` and `EXECUTOR`, vLLM 0.32, 0.33).
    """
    before = module.get_mp_context
    module.get_mp_context = EngineContext  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.get_mp_context = before  # type: ignore[attr-defined]


def hear() -> None:
    """Let what a process started here was killed by be said, before what came of that here."""
    for process, watch in list(_watches.items()):
        if connection.wait([process.sentinel], timeout=0):
            watch.join(PATIENCE)


def kill(home: Path) -> None:
    """Give up the start of the engine of that folder: its processes, and theirs with them, end at once."""
    _given_up.add(str(home))
    for process in list(_watches):
        if process.home == str(home):
            process.kill()


def _killer(process: SpawnProcess) -> int:
    """The signal that ends the process, waited for; 0 if it ends by itself."""
    assert process.pid is not None
    try:
        # To be looked at, not collected: that is vLLM's, who would take a process that others have collected for alive.
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        while process.exitcode is None:  # vLLM is just collecting it
            time.sleep(0.01)
        return max(-process.exitcode, 0)
    return ended.si_status if ended is not None and ended.si_code != os.CLD_EXITED else 0


def said_first(tell: Callable[P, R]) -> Callable[P, R]:
    """The function, which tells the client of an error that is being handled, called when its cause has been left."""

    @functools.wraps(tell)
    def telling(*args: P.args, **kwargs: P.kwargs) -> R:
        error = sys.exception()
        with suppress(Exception):
            hear()
            if error is not None:
                last_words.leave(last_words.words_of(error))
        return tell(*args, **kwargs)

    return telling


def _enter_core() -> None:
    core: Any = sys.modules.get(CORE)
    if core is not None:
        require(core, ["EngineCoreProc._send_engine_dead"])
        around(core.EngineCoreProc, "_send_engine_dead", said_first)  # the client asks for the cause at once


def _enter_workers() -> None:
    executor: Any = sys.modules.get(EXECUTOR)
    if executor is not None:
        require(executor, ["WorkerProc", "get_mp_context"])
        executor.get_mp_context = EngineContext
        around(executor.WorkerProc, "__init__", last_words.spoken)  # `worker_main` keeps what that raises to itself


def _end_with_parent() -> None:
    parent: Any = parent_process()
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE)
    os._exit(1)


def _end(status: int) -> None:
    """End as a forked process does, by its exit handlers alone: taking torch and vLLM apart takes seconds."""
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
