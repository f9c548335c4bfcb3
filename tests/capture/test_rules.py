"""What a block cannot hold is refused when the `with` is entered, with the line and what to write instead."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from nnsight_async.errors import CaptureError

REFUSED = {
    "return": ("x = 1\nreturn x", "return x", "tracer.stop"),
    "await": ("x = await something", "x = await something", "above the block"),
    "async for": ("async for x in y:\n    pass", "async for x in y:", "above the block"),
    "async with": ("async with y:\n    pass", "async with y:", "above the block"),
    "a trace": ("async with model.trace(y):\n    pass", "async with model.trace(y):", "tracer.invoke(prompt)"),
    "an edit": ("async with model.edit() as y:\n    pass", "async with model.edit() as y:", "side by side"),
    "an invoke": ("async with tracer.invoke(y):\n    pass", "async with tracer.invoke(y):", "side by side"),
    "async comprehension": ("x = [i async for i in y]", "x = [i async for i in y]", "above the block"),
    "break": ("if x:\n    break", "break", "under an `if`"),
    "continue": ("if x:\n    continue", "continue", "under an `if`"),
    "break in the else of a loop": ("for i in y:\n    pass\nelse:\n    break", "break", "under an `if`"),
    "global": ("global x\nx = 1", "global x", "after the block"),
    "global in a function": ("def f():\n    global x\n    x = 1", "global x", "after the block"),
    "nonlocal": ("nonlocal z\nz = 1", "nonlocal z", "after the block"),
    "nonlocal of the caller": ("def f():\n    nonlocal z\n    z = 1", "", "nonlocal"),
    "super": ("super().run()", "super().run()", "super(Class, self)"),
    "super in a function": ("def f():\n    super().run()", "super().run()", "super(Class, self)"),
    "super among the bases": ("class D(super().kind):\n    pass", "class D(super().kind):", "super(Class, self)"),
    "__class__": ("x = __class__", "x = __class__", "super(Class, self)"),
}

PLACE = """
x = 0
def around():
    z = 0
    class C:
        async def run(self, y=()):
            {before}
            for _ in range(1):
                with trace():
{body}
                    pass
    return C
"""


@pytest.mark.parametrize(("body", "line", "advice"), REFUSED.values(), ids=REFUSED.keys())
def test_is_refused(body: str, line: str, advice: str, cell: Any, trace: Any) -> None:
    inner = textwrap.indent(body, " " * 20)
    text = PLACE.format(body=inner, before="pass" if body.startswith("nonlocal") else "nonlocal z")
    method = cell(text, trace=trace)["around"]()().run()

    with pytest.raises(CaptureError) as refused:
        method.send(None)

    assert line in str(refused.value)
    assert advice in str(refused.value)


def test_a_yield_is_refused(trace: Any) -> None:
    def generate() -> Any:
        with trace():
            yield 1

    with pytest.raises(CaptureError, match=r"yield cannot be part of a block.*yield after the block"):
        next(generate())


def test_import_star_is_refused(cell: Any, trace: Any) -> None:
    with pytest.raises(CaptureError, match=r"import \*"):
        cell("with trace():\n    from math import *\n", trace=trace)


def test_functions_in_the_body_may_return_yield_and_await(trace: Any) -> None:
    with trace() as run:

        def f() -> int:
            for _ in range(3):
                break
            return 1

        def g() -> Any:
            yield f()

        async def h() -> None:
            await f()

        total = sum(g()).save()

    assert (total, run.captured) == (1, True)


def test_a_refused_body_does_not_run(trace: Any) -> None:
    ran = []

    def enter() -> None:
        with trace():
            ran.append(1)
            return

    with pytest.raises(CaptureError):
        enter()
    assert ran == []
