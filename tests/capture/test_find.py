# ruff: noqa: RET504 -- a block is what is assigned in it, and may well be several statements
"""The `with` that is being entered is found exactly, wherever it stands."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from contextlib import nullcontext
from typing import Any

import pytest

from nnsight_async.capture.body import BodyCapture
from nnsight_async.errors import CaptureError


def test_several_statements_on_a_line(cell: Any, trace: Any) -> None:
    result = cell("x = 1\nfor i in [1, 2]:\n    with trace(): x = (x * 10 + i).save()\n", trace=trace)

    assert result["x"] == 112


def test_a_body_on_the_line_of_its_header(trace: Any) -> None:
    before = 3
    with trace() as run: result = (before + 1).save(); other = (before + 2).save()  # noqa: E701, E702  # fmt: skip

    assert (result, other, run.block.names) == (4, 5, ("result", "other"))


def test_nested_in_one_another(trace: Any) -> None:
    with nullcontext(1) as outside:
        between = 2
        with trace():  # noqa: SIM117
            with nullcontext(3) as inside:
                result = (outside, between, inside).save()

    assert result == (1, 2, 3)


def test_nested_on_one_line(cell: Any, trace: Any) -> None:
    text = (
        "from contextlib import nullcontext\nif 1:\n  with nullcontext(1) as a:\n    with trace(): b = (a + 1).save()"
    )

    assert cell(text, trace=trace)["b"] == 2


@pytest.mark.parametrize(
    "header",
    [
        "trace() as t, nullcontext(5) as a, nullcontext(6) as b",
        "nullcontext(5) as a, trace() as t, nullcontext(6) as b",
        "nullcontext(5) as a, nullcontext(6) as b, trace() as t",
        "nullcontext(5) as a, nullcontext(6) as b, trace()",
        "(trace() as t, nullcontext(5) as a,\n      nullcontext(6) as b,\n     )",
        "(nullcontext((5, 6)) as (\n   a, b), \n   trace(\n   ) as t\n)",
    ],
)
@pytest.mark.parametrize(
    "body", ["\n    c = (a + b).save()", " c = (a + b).save()", "\n    try: c = (a + b).save()\n    finally: pass"]
)
def test_among_several_context_managers(header: str, body: str, cell: Any, trace: Any) -> None:
    if body.endswith("pass") and "nullcontext(6) as b" in header.split("trace", 1)[1]:
        with pytest.raises(CaptureError, match=r"begins with `try`.*statement before the `try`"):
            cell(f"from contextlib import nullcontext\nwith {header}:{body}\n", trace=trace)
        return

    result = cell(f"from contextlib import nullcontext\nwith {header}:{body}\n", trace=trace)

    assert result["c"] == 11


def test_as_assigns_although_the_body_begins_with_try(trace: Any) -> None:
    with trace() as run:
        try:
            x = (1).save()
        finally:
            y = (2).save()

    assert (x, y, run.captured) == (1, 2, True)


@pytest.mark.filterwarnings("ignore:.*where it is a copy:UserWarning")
def test_a_body_that_begins_with_try_and_no_as(trace: Any) -> None:
    ran = []
    with trace():
        try:
            x = (1).save()
        except BaseException:
            x = 0
        finally:
            ran.append(1)

    assert (x, ran) == (1, [])


def test_two_of_ours_in_one_statement_are_refused(trace: Any) -> None:
    with pytest.raises(CaptureError, match="one `with` has one block"), trace(), trace():
        pass


def test_an_async_with(trace: Any) -> None:
    async def run() -> object:
        offset = 2
        async with trace() as tracer:
            x = (offset + 1).save()
        return x, tracer.captured

    assert asyncio.run(run()) == (3, True)


def test_among_context_managers_that_suspend(trace: Any) -> None:
    @contextlib.asynccontextmanager
    async def slow(value: int) -> Any:
        await asyncio.sleep(0)
        yield value
        await asyncio.sleep(0)

    async def run() -> object:
        async with slow(1) as a, trace(), slow(2) as b:
            x = (a + b).save()
        return x

    assert asyncio.run(run()) == 3


def test_a_task_group_after_it_does_not_notice(trace: Any) -> None:
    async def run() -> object:
        async with trace(), asyncio.TaskGroup():
            x = (1).save()
        return x

    assert asyncio.run(run()) == 1


def test_under_a_decorator(trace: Any) -> None:
    def twice(function: Any) -> Any:
        return lambda: (function(), function())

    @twice
    @twice
    def run() -> int:
        with trace():
            x = (1).save()
        return x

    assert run() == ((1, 1), (1, 1))


def test_entered_by_hand_is_refused(trace: Any) -> None:
    with pytest.raises(CaptureError, match=r"model\.run\(prompt, probe\)"):
        trace().__enter__()


def test_entered_by_an_exit_stack_is_refused(trace: Any) -> None:
    with contextlib.ExitStack() as stack, pytest.raises(CaptureError, match="must be entered by a `with` statement"):
        stack.enter_context(trace())


def test_a_generator_function(trace: Any) -> None:
    def produce() -> Any:
        for i in range(3):
            with trace():
                x = (i * 2).save()
            yield x

    assert list(produce()) == [0, 2, 4]


def test_without_columns(tmp_path: Any) -> None:
    import subprocess

    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from nnsight_async.capture.body import BodyCapture\n"
        "class T:\n"
        "    def __enter__(self):\n"
        "        self.c = BodyCapture(sys._getframe(1))\n"
        "        self.c.skip(self)\n"
        "        return self\n"
        "    def __exit__(self, *e):\n"
        "        return self.c.leave(*e)\n"
        "def f():\n"
        "    with T() as t:\n"
        "        print('ran')\n"
        "    print(t.c.block().names)\n"
        "    with T(): print('ran')\n"
        "f()\n"
    )
    command = [sys.executable, "-X", "no_debug_ranges", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)

    assert result.stdout == "()\n"
    assert "Put the body on its own line" in result.stderr


def test_the_capture_needs_the_frame_of_the_statement() -> None:
    with pytest.raises(CaptureError, match="must be entered by a `with` statement"):
        BodyCapture(sys._getframe())
