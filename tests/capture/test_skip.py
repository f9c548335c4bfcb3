"""The body does not run in the caller, and whoever traces the program does not notice."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from nnsight_async.capture.body import BodyCapture
from nnsight_async.errors import CaptureError

pytestmark = pytest.mark.filterwarnings("ignore:.*where it is a copy:UserWarning")
"""Many bodies would fill a list, to show that they do not run here."""


@pytest.fixture
def untraced() -> Any:
    """Gives the test a thread without a trace function, whatever runs pytest."""
    before = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(before)


def test_the_body_does_not_run_here(trace: Any) -> None:
    ran = []
    with trace(run=False):
        ran.append(1)

    assert ran == []


def test_tracing_is_off_again_afterwards(trace: Any, untraced: None) -> None:
    with trace():
        x = (1).save()

    assert (x, sys.gettrace(), sys._getframe().f_trace) == (1, None, None)
    assert (sys._getframe().f_trace_lines, sys._getframe().f_trace_opcodes) == (True, False)


def test_one_line_bodies_leave_no_opcode_tracing(trace: Any, untraced: None) -> None:
    with trace(): (1).save()  # noqa: E701  # fmt: skip

    assert (sys._getframe().f_trace_lines, sys._getframe().f_trace_opcodes) == (True, False)


def test_except_around_the_statement_sees_nothing(trace: Any) -> None:
    seen = []
    try:
        with trace():
            x = (1).save()
    except BaseException as error:
        seen.append(error)
    else:
        seen.append("nothing")

    assert (seen, x) == (["nothing"], 1)


def test_an_error_of_a_later_context_manager_passes(trace: Any, untraced: None) -> None:
    @contextlib.contextmanager
    def failing() -> Any:
        raise OSError("no")
        yield

    run = trace()
    with pytest.raises(OSError, match="no"), run, failing():
        pass

    assert not run.captured
    assert (sys.gettrace(), sys._getframe().f_trace) == (None, None)


def test_an_error_on_leaving_a_later_context_manager_does_not_mention_us(trace: Any) -> None:
    @contextlib.contextmanager
    def failing() -> Any:
        try:
            yield
        finally:
            raise OSError("no")

    with pytest.raises(OSError, match="no") as caught, trace(), failing():
        pass_over = 1

    assert caught.value.__context__ is None


def test_a_later_context_manager_that_swallows_everything(trace: Any) -> None:
    with trace() as run, contextlib.suppress(BaseException):
        x = (1).save()

    assert (x, run.captured) == (1, True)


class Skipping:
    """Skips the body of a `with`, and knows nobody who knows it."""

    def __enter__(self) -> None:
        self._capture = BodyCapture(sys._getframe(1))
        self._capture.skip()

    def __exit__(self, *error: object) -> bool:
        return self._capture.leave(*error)  # type: ignore[arg-type]

    def __aenter__(self) -> Any:
        self._capture = BodyCapture(sys._getframe(1))
        self._capture.skip()
        return asyncio.sleep(0)

    async def __aexit__(self, *error: object) -> bool:
        return self._capture.leave(*error)  # type: ignore[arg-type]


class Held:
    pass


def returns_after_with() -> weakref.ref[Held]:
    held = Held()
    with Skipping():
        held.x = 1  # type: ignore[attr-defined]
    return weakref.ref(held)


async def returns_after_async_with() -> weakref.ref[Held]:
    held = Held()
    async with Skipping():
        held.x = 1  # type: ignore[attr-defined]
    return weakref.ref(held)


def test_a_function_that_has_returned_keeps_nothing() -> None:
    gc.disable()  # nothing is left to it
    try:
        assert returns_after_with()() is None
        assert asyncio.run(returns_after_async_with())() is None
    finally:
        gc.enable()


class Recorder:
    """A line tracer such as coverage's, in Python."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, int]] = []

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != __file__:
            return None
        if event == "line":
            self.lines.append((frame.f_code.co_name, frame.f_lineno - frame.f_code.co_firstlineno))
        return self


def test_a_line_tracer_sees_all_but_the_body(trace: Any, untraced: None) -> None:
    @contextlib.contextmanager
    def later() -> Any:
        yield 1

    def run() -> object:
        a = 1
        with trace() as t, later():
            x = (a + 1).save()
            x + 1
        b = x
        return b, t

    recorder = Recorder()
    sys.settrace(recorder)
    try:
        result = run()
        after = sys.gettrace()
    finally:
        sys.settrace(None)

    assert result[0] == 2  # type: ignore[index]
    assert after is recorder
    here = [line for name, line in recorder.lines if name == "run"]
    assert {1, 2, 5, 6} <= set(here)
    assert ("later", 2) in recorder.lines
    # the rest of what it saw is the block itself, run by this test's stand-in for the worker
    assert here[-2:] == [5, 6]


def test_a_debugger_keeps_its_hold_on_the_frame(trace: Any, untraced: None) -> None:
    frame = sys._getframe()
    stops: list[int] = []

    def debugger(frame: Any, event: str, arg: Any) -> Any:
        stops.append(frame.f_lineno - frame.f_code.co_firstlineno)
        return debugger

    frame.f_trace, frame.f_trace_opcodes = debugger, False
    sys.settrace(debugger)
    with trace():
        x = (1).save()
    kept = (sys.gettrace(), frame.f_trace)
    x = x + 1
    sys.settrace(None)
    frame.f_trace = None

    assert kept == (debugger, debugger)
    assert x == 2  # what was bound is not undone by the trace function
    assert stops[-1] == 14


PROGRAM = """
import sys
from nnsight_async.capture.body import BodyCapture
class T:
    def __enter__(self):
        self.c = BodyCapture(sys._getframe(1))
        self.c.skip()
    def __exit__(self, *error):
        left = self.c.leave(*error)
        self.c.bind({"x": 7})
        return left
def run():
    before = 1
    with T():
        print("ran")
        x = before + 1
    after = x + before
    return after
print("result", run())
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.strip() == text)


@pytest.mark.parametrize(
    ("commands", "stops"),
    [
        (["b {before}", "c", "n", "n"], ["before = 1", "with T():", "after = x + before"]),
        (["b {before}", "c", "until {after}"], ["before = 1", "after = x + before"]),
        (["b {after}", "c"], ["after = x + before"]),
        (["b {body}", "b {after}", "c"], ["after = x + before"]),
    ],
    ids=["next", "until", "a breakpoint after it", "a breakpoint in the body"],
)
def test_pdb(commands: list[str], stops: list[str], program: Path) -> None:
    lines = {"before": line_of("before = 1"), "after": line_of("after = x + before"), "body": line_of("x = before + 1")}
    given = [command.format(**lines) for command in (*commands, "p ('x', x)", "c", "q")]
    command = [sys.executable, "-m", "pdb", str(program)]
    text = subprocess.run(command, input="\n".join(given), capture_output=True, text=True, check=False).stdout

    assert "ran" not in text.split()
    assert "('x', 7)" in text
    assert "result 8" in text
    shown = [line.removeprefix("-> ") for line in text.splitlines() if line.startswith("-> ")]
    places = [place for place in shown if place in stops]
    assert places == stops


@pytest.mark.parametrize("options", [["-m", "cProfile"], ["-m", "trace", "--count", "-C", "."], ["-X", "dev"]])
def test_a_program_under_a_tool(options: list[str], program: Path) -> None:
    command = [sys.executable, *options, str(program)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=program.parent)

    assert "result 8" in result.stdout
    assert "ran" not in result.stdout.split()


CORES = ["ctrace", "pytrace", *(["sysmon"] if sys.version_info >= (3, 12) else [])]


@pytest.mark.parametrize("core", CORES)
def test_coverage_of_a_program(core: str, program: Path) -> None:
    environment = {**os.environ, "COVERAGE_CORE": core, "COVERAGE_FILE": str(program.parent / "data")}
    for command in (["run", f"--include={program}", str(program)], ["json", "-o", "report.json"]):
        subprocess.run(
            [sys.executable, "-m", "coverage", *command],
            env=environment,
            cwd=program.parent,
            capture_output=True,
            check=True,
        )
    (measured,) = json.loads((program.parent / "report.json").read_text())["files"].values()

    users = [line for line in measured["missing_lines"] if line >= line_of("def run():")]
    assert users == [line_of('print("ran")'), line_of("x = before + 1")]


def test_the_trace_function_of_coverage(trace: Any, untraced: None, tmp_path: Any) -> None:
    import coverage

    measuring = coverage.Coverage(data_file=None, include=[__file__], config_file=False)
    with measuring.collect():
        _measured(trace)
    _, _, _, missing, _ = measuring.analysis2(__file__)
    first = _measured.__code__.co_firstlineno

    assert {first + n for n in (1, 2, 4, 6, 7)} & set(missing) == set()


def _measured(trace: Any) -> int:
    x = 0
    with trace(run=False):
        x = (5).save()
    x += 1

    if x:
        return x
    return 0


def test_many_tasks_at_once(trace: Any) -> None:
    @contextlib.asynccontextmanager
    async def slow() -> Any:
        await asyncio.sleep(0)
        yield
        await asyncio.sleep(0)

    ran = []

    async def one(i: int) -> object:
        await asyncio.sleep(0)
        async with trace() as tracer:
            value = (i * 2).save()
            ran.append(i)
        await asyncio.sleep(0)
        async with trace(), asyncio.Semaphore(1):
            value = (value + 1).save()
        return value, tracer.captured

    async def many() -> Any:
        return await asyncio.gather(*(one(i) for i in range(200)))

    assert asyncio.run(many()) == [(i * 2 + 1, True) for i in range(200)]
    assert ran == []


def test_tasks_that_are_suspended_between_header_and_body(trace: Any, untraced: None) -> None:
    turns = [asyncio.Event() for _ in range(4)]

    @contextlib.asynccontextmanager
    async def wait(i: int) -> Any:
        await turns[i].wait()
        yield

    ran = []

    async def one(i: int) -> bool:
        async with trace(run=False) as tracer, wait(i):
            ran.append(i)
        if i:
            turns[i - 1].set()
        return tracer.captured

    async def many() -> Any:
        async with asyncio.timeout(30):
            tasks = [asyncio.create_task(one(i)) for i in range(4)]
            await asyncio.sleep(0)
            turns[3].set()
            return await asyncio.gather(*tasks)

    assert asyncio.run(many()) == [True] * 4
    assert (ran, sys.gettrace()) == ([], None)


def test_threads_do_not_see_each_other(trace: Any) -> None:
    results: list[tuple[int, object]] = []
    ready = threading.Barrier(8)

    def work(i: int) -> None:
        ready.wait(timeout=30)
        for step in range(50):
            with trace(run=False) as run:
                (i * step).save()
            assert run.captured
            assert sys.gettrace() is None
        results.append((i, run.block.names))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)

    assert sorted(results) == [(i, ()) for i in range(8)]


def test_a_body_that_ran_after_all_is_an_error(trace: Any, untraced: None) -> None:
    @contextlib.contextmanager
    def untrace() -> Any:
        sys.settrace(None)
        yield

    ran = 0
    with (
        pytest.raises(CaptureError, match=r"ran here instead of becoming a block.*Put the trace last"),
        trace(),
        untrace(),
    ):
        ran = 1

    assert ran == 1


def test_cancelling_while_the_header_waits(trace: Any, untraced: None) -> None:
    @contextlib.asynccontextmanager
    async def never() -> Any:
        await asyncio.Event().wait()
        yield

    async def run() -> None:
        async with trace(), never():
            pass

    async def main() -> None:
        task = asyncio.create_task(run())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert sys.gettrace() is None
