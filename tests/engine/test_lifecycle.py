"""Engines that die, and engines that are left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nnsight_async import VLLM, EngineClosedError, EngineDeadError
from nnsight_async.testing.engine import tiny_engine_args
from tests.conftest import LONG, engine_args_for_long

PROMPT = [5, 17, 101]
PATIENCE = 60.0  # seconds


def core_of(model: VLLM) -> psutil.Process:
    """The engine's process, as vLLM knows it."""
    return psutil.Process(model.vllm_entrypoint.engine_core.resources.engine_manager.processes[0].pid)


def worker_of(model: VLLM) -> psutil.Process:
    return next(child for child in core_of(model).children() if "Worker" in command(child))


def family(model: VLLM) -> list[psutil.Process]:
    core = core_of(model)
    return [core, *core.children(recursive=True)]


def command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=PATIENCE)[1]


def read_logits(model: Any, tracer: Any) -> None:
    for _ in tracer.iter[:]:
        tracer.save(model.logits, "logits")


def say_nothing(model: Any, tracer: Any) -> None:
    pass


async def traced(model: VLLM) -> None:
    async with model.trace(PROMPT, max_tokens=1) as tracer:
        logits = model.logits.save()
    await tracer.result


async def mapped(model: VLLM) -> None:
    async for _ in model.map([PROMPT], say_nothing):
        pass


async def entered(model: VLLM) -> None:
    async with model:
        pass


async def stated(model: VLLM) -> None:
    await model.stats()


CALLS: dict[str, Callable[[VLLM], Awaitable[Any]]] = {
    "trace": traced,
    "run": lambda model: model.run(PROMPT, read_logits, max_tokens=1),
    "map": mapped,
    "generate": lambda model: model.generate(PROMPT, max_tokens=1),
    "stats": stated,
    "dispatch": lambda model: model.dispatch(),
    "async with": entered,
}


async def test_an_engine_whose_worker_is_killed(llama: str) -> None:
    model = VLLM(llama, mode="async", **{**engine_args_for_long(), "distributed_executor_backend": "mp"})
    async with asyncio.timeout(300):
        await model.dispatch()
        processes, worker = family(model), worker_of(model)
        run = model.run(PROMPT, read_logits, **LONG)
        async with run:
            await anext(run.saves["logits"].stream())
            worker.suspend()
            stats = asyncio.ensure_future(model.stats())
            await asyncio.sleep(0)

            worker.kill()

            for waiting in (run.result, stats):
                with pytest.raises(EngineDeadError, match="VllmWorker-0 was ended by SIGKILL"):
                    await waiting
        for call in CALLS.values():
            with pytest.raises(EngineDeadError, match="VllmWorker-0 was ended by SIGKILL"):
                await call(model)
        await model.aclose()
        with pytest.raises(EngineClosedError):
            await model.stats()
    assert gone(processes)


async def test_an_engine_whose_core_is_killed_and_the_next_one(llama: str) -> None:
    model = VLLM(llama, mode="async", **engine_args_for_long())
    async with asyncio.timeout(300), model:
        async with model.trace(PROMPT, **LONG) as tracer:
            for _ in tracer.iter[:]:
                logits = model.logits.save()
        await anext(logits.stream())
        processes = family(model)
        core_of(model).kill()
        for waited in (logits, tracer.result):
            with pytest.raises(EngineDeadError, match="EngineCore was ended by SIGKILL"):
                await waited
        with pytest.raises(EngineDeadError):
            await model.generate(PROMPT)
    assert gone(processes)

    async with asyncio.timeout(300), VLLM(llama, mode="async", **tiny_engine_args()) as another:
        (output,) = await another.generate(PROMPT, max_tokens=3, ignore_eos=True)
        assert len(output.outputs[0].token_ids) == 3


# -- scripts -----------------------------------------------------------------------------------------------------------

INTERRUPTED = """
from nnsight_async import VLLM
from nnsight_async.testing.engine import tiny_engine_args

if __name__ == "__main__":
    model = VLLM({llama!r}, dispatch=True, **tiny_engine_args())
    try:
        with model.trace([5, 6, 7], max_tokens=250, ignore_eos=True) as tracer:
            for step in tracer.iter[:]:
                print("step", step)
                __import__("time").sleep(0.2)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    with model.trace([5, 6, 7], max_tokens=1):
        logits = model.logits.save()
    print("and on", logits.shape, flush=True)
"""

STARTING = """
import asyncio
from nnsight_async import VLLM
from nnsight_async.testing.engine import tiny_engine_args

async def main():
    async with VLLM({llama!r}, mode="async", **tiny_engine_args()):
        pass

if __name__ == "__main__":
    {start}
"""

SYNC_START = "VLLM({llama!r}, dispatch=True, **tiny_engine_args())"


class Script:
    """A script as a terminal runs it: in a process group of its own, which is where Ctrl-C goes."""

    def __init__(self, code: str, folder: Path) -> None:
        file = folder / "script.py"
        file.write_text(code)
        self.errors = (folder / "errors").open("w+")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(file)],
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=environment,
            start_new_session=True,
            # A job in the background of a shell ignores Ctrl-C, and so would what it starts.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def lines(self) -> Iterator[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield line.strip()

    def interrupt(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self) -> str:
        """What it has said on stderr."""
        try:
            self.process.wait(PATIENCE)
        finally:
            for left in self.in_session():
                left.kill()
            assert self.process.stdout is not None
            self.process.stdout.close()
        self.errors.seek(0)
        return self.errors.read()

    def in_session(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if _session(process.pid) == self.process.pid]


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return 0


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[[str], Script]]:
    begun: list[Script] = []

    def begin(code: str) -> Script:
        begun.append(Script(code, tmp_path))
        return begun[-1]

    yield begin
    for one in begun:
        one.end()
        one.errors.close()


def test_an_interrupted_run_leaves_the_engine_and_an_engine_left_behind_ends_quietly(
    llama: str, script: Callable[[str], Script]
) -> None:
    running = script(INTERRUPTED.format(llama=llama))
    lines = running.lines()
    assert "step 0" in next(lines)
    processes = running.descendants()
    assert processes
    running.interrupt()

    said = [line for line in lines if "step" not in line]
    assert said == ["interrupted", "and on torch.Size([1, 512])"]
    errors = running.end()
    assert "Traceback" not in errors, errors
    assert running.process.returncode == 0
    assert gone(processes)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["asyncio.run(main())", SYNC_START], ids=["async", "sync"])
def test_a_start_that_is_interrupted(llama: str, script: Callable[[str], Script], start: str) -> None:
    starting = script(STARTING.format(llama=llama, start=start.format(llama=llama)))
    core = None
    while core is None:
        assert starting.process.poll() is None
        core = next((child for child in starting.descendants() if "spawn_main" in command(child)), None)
    starting.interrupt()

    errors = starting.end()
    assert [line for line in errors.splitlines() if line.startswith("KeyboardInterrupt")] == ["KeyboardInterrupt"], (
        errors
    )
    assert errors.rstrip().endswith("KeyboardInterrupt"), errors
    assert "spawn_main" not in errors
    assert "Process EngineCore" not in errors
    assert gone([core])
