# ruff: noqa: RET504, PT012 -- a block is what is assigned in it, and may well be several statements
"""A body run as a block gives what plain Python gives when it runs where it stands."""

from __future__ import annotations

import linecache
import textwrap
import traceback
from typing import Any

import pytest

from nnsight_async.errors import CaptureError

BODIES = {
    "arithmetic on outer names": "result = a * 10 + b",
    "an outer name that the body changes": "count += 1\nresult = count",
    "a name assigned before it is read": "a = 7\nresult = a",
    "a loop that reads what the round before assigned": "for i in range(4):\n    count = count * 2 + i\nresult = count",
    "a name that only one branch assigns": "if a > 100:\n    b = 0\nresult = b",
    "a comprehension over outer names": "result = [a * x for x in items if x > b - 2]",
    "nested comprehensions": "result = {x: [y for y in items if y < x] for x in items}",
    "a comprehension variable named like an outer one": "result = [a for a in items] + [a]",
    "a lambda": "result = (lambda x: x + a)(b)",
    "a function": "def f(x, y=a):\n    return x + y + b\nresult = f(1)",
    "recursion": "def fact(n):\n    return 1 if n < 2 else n * fact(n - 1)\nresult = fact(5)",
    "mutual recursion": (
        "def even(n):\n    return n == 0 or odd(n - 1)\n"
        "def odd(n):\n    return n != 0 and even(n - 1)\nresult = even(10)"
    ),
    "a generator": "def g():\n    for x in items:\n        yield x + a\nresult = list(g())",
    "nonlocal inside the body": ("n = 0\ndef f():\n    nonlocal n\n    n += a\n    return n\nf()\nf()\nresult = n"),
    "a class": "class P:\n    scale = a\n    def f(self, x):\n        return x * self.scale + b\nresult = P().f(3)",
    "a decorated function": "@helper\ndef f():\n    return a\nresult = f",
    "a decorated function first": "@(lambda f: f())\ndef f():\n    return a\nresult = f",
    "an import": "import math\nfrom os import path as p\nresult = math.floor(2.5) + len(p.basename('a/bc'))",
    "a walrus": "result = [y := a + 1, y * 2]",
    "a walrus in a comprehension": "_ = [last := x for x in items]\nresult = last",
    "unpacking": "x, (y, *z) = 1, (2, 3, 4)\nresult = (x, y, z)",
    "try": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    result = str(e)\nfinally:\n    a = 0",
    "try with else": "try:\n    x = a\nexcept ValueError:\n    x = 0\nelse:\n    x += 1\nresult = x",
    "match": "match items:\n    case [first, *rest]:\n        result = (first, rest)\n    case _:\n        result = 0",
    "with": "from contextlib import nullcontext\nwith nullcontext(a) as x:\n    result = x + 1",
    "while with break and else": "while True:\n    a += 1\n    if a > 9:\n        break\nelse:\n    a = 0\nresult = a",
    "for with continue": "total = 0\nfor x in items:\n    if x == 2:\n        continue\n    total += x\nresult = total",
    "a loop that runs no round": "for x in []:\n    b = 0\nresult = b",
    "del": "t = a\ndel t\nresult = 't' in locals()",
    "an f-string": "result = f'{a:>4}|{b!r}|{items[0]}'",
    "an assert": "assert a == 2, 'no'\nresult = a",
    "a helper of the file": "result = helper(lambda: a)",
    "a name of a builtin": "result = max(items) + len(items)",
    "a builtin that the file replaces": "result = sum(items)",
    "a string with lines": 'result = """one\n  two"""',
    "a multi-line expression": "result = (\n    a\n    + b\n)",
    "an annotated name": "x: int = a\nresult = x",
    "a conditional import": "if a:\n    import json as j\nresult = j.dumps(items)",
    "shared objects stay shared": "result = pair[0] is pair[1]",
    "several statements on a line": "x = a; y = b; result = x - y",
}

OUTSIDE = """
a, b, count, items = 2, 3, 5, [1, 2, 3]
pair = [items, items]
"""

FILE = """
def helper(f):
    return f() * 100

def sum(values):
    return -1

"""


def in_a_function(body: str) -> str:
    return FILE + "def run():\n" + textwrap.indent(OUTSIDE + body + "\nreturn result\n", "    ") + "\nresult = run()\n"


def in_a_method(body: str) -> str:
    inner = textwrap.indent(OUTSIDE + body + "\nreturn result\n", "    ")
    return FILE + "class C:\n" + textwrap.indent("def run(self):\n" + inner, "    ") + "\nresult = C().run()\n"


def in_a_closure(body: str) -> str:
    inner = textwrap.indent("def inner():\n    nonlocal a, b, count\n" + textwrap.indent(body, "    "), "    ")
    outer = textwrap.indent(OUTSIDE, "    ")
    return FILE + "def run():\n" + outer + inner + "\n        return result\n    return inner()\nresult = run()\n"


def at_module_level(body: str) -> str:
    return FILE + OUTSIDE + body + "\n"


def in_an_async_function(body: str) -> str:
    inner = textwrap.indent(OUTSIDE + body.replace("with trace", "async with trace") + "\nreturn result\n", "    ")
    return FILE + "import asyncio\nasync def run():\n" + inner + "\nresult = asyncio.run(run())\n"


PLACES = (in_a_function, in_a_method, in_a_closure, at_module_level, in_an_async_function)
CASES = [
    pytest.param(place, body, id=f"{name}-{place.__name__}")
    for name, body in BODIES.items()
    for place in PLACES
    if place is not at_module_level or "nonlocal" not in body  # of which a module has none
]


@pytest.mark.parametrize(("place", "body"), CASES)
def test_equals_plain_python(body: str, place: Any, cell: Any, trace: Any) -> None:
    expected = cell(place(body))["result"]

    traced = "with trace():\n" + textwrap.indent(body + "\nresult.save()", "    ")
    if '"""' in body:
        traced = 'with trace():\n    result = """one\n  two"""\n    result.save()'

    assert cell(place(traced), trace=trace)["result"] == expected


def test_an_unknown_name_is_a_name_error_at_its_line(trace: Any) -> None:
    with pytest.raises(NameError, match="nowhere") as caught, trace():
        x = 1
        nowhere + x  # noqa: F821  # line of the error

    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert last.line == "nowhere + x  # noqa: F821  # line of the error"
    assert (last.filename, last.name) == (__file__, "test_an_unknown_name_is_a_name_error_at_its_line")


def test_an_unbound_local_stays_unbound(cell: Any, trace: Any) -> None:
    text = """
    value = "global"
    def run():
        with trace():
            value.save()
        value = "local"
    """
    namespace = cell(text, trace=trace)

    with pytest.raises(NameError, match="value"):
        namespace["run"]()


def test_a_name_that_the_function_declares_global(cell: Any, trace: Any) -> None:
    text = """
    total = 3
    def run():
        global total
        with trace():
            total += 1
            total.save()
    run()
    """

    assert cell(text, trace=trace)["total"] == 4


def test_private_names_of_a_class(trace: Any) -> None:
    class Account:
        def __init__(self) -> None:
            self.__balance = 3

        def read(self) -> int:
            __local = 4
            with trace():
                __local += self.__balance
                found = __local.save()
            return found

    assert Account().read() == 7


def test_in_a_class_body(trace: Any) -> None:
    class Config:
        width = 4
        with trace():
            double = width * 2
            double.save()

    assert Config.double == 8


def test_a_class_body_inside_a_function_names_the_variable_it_cannot_see(trace: Any) -> None:
    scale = 4
    with pytest.raises(CaptureError, match=r"'scale'.*scale = scale"):

        class Config:
            with trace():
                scale.save()


def test_values_are_those_of_the_moment_of_capture(saves: Any, trace: Any) -> None:
    scale = [1]
    with trace(run=False) as first:
        scale.save()
    scale.append(2)
    first._run_block(first.block)

    assert saves["scale"] == [1]


def test_only_the_names_that_the_body_uses_travel(trace: Any) -> None:
    unrelated = "x" * 1_000_000
    used = "y" * 10
    with trace() as run:
        used.save()

    assert len(unrelated) == 1_000_000
    assert len(run.block.payload) < 2_000


def test_an_earlier_result_under_a_name_that_the_body_assigns_stays_behind(trace: Any) -> None:
    hidden: Any = (i for i in range(3))  # cannot travel
    for step in range(3):
        with trace():
            hidden = step * 2
            hidden.save()
        if step < 2:
            hidden = (i for i in range(3))

    assert hidden == 4


def test_an_earlier_result_stays_behind_when_a_loop_assigns_the_name(trace: Any) -> None:
    hidden: Any = (i for i in range(3))  # cannot travel; a loop of no rounds would read it
    with trace():
        for step in range(3):
            hidden = step
        hidden.save()

    assert hidden == 2


def test_each_run_of_a_loaded_block_starts_from_the_same_values(trace: Any, saves: Any) -> None:
    count = 1
    with trace(run=False) as run:
        count += 1
        count.save()
    for _ in range(2):
        run._run_block(run.block)

        assert saves["count"] == 2


def test_the_model_and_the_tracer_travel_as_names(trace: Any, model: Any, saves: Any) -> None:
    model.here = {"weight": 5}
    with trace() as tracer:
        weight = model["weight"].save()
        same = (tracer is not None).save()

    assert (weight, same) == (5, True)


def test_the_block_describes_itself(trace: Any) -> None:
    with trace() as run:
        x = (1).save()
        y = x + 1
        y.save()

    assert run.block.names == ("x", "y")
    assert run.block.filename == __file__
    assert run.block.function == "test_the_block_describes_itself"
    assert linecache.getline(__file__, run.block.first_line) == "    with trace() as run:\n"


def test_an_empty_body_is_an_empty_block(trace: Any) -> None:
    with trace() as run: pass  # noqa: E701  # fmt: skip

    assert run.captured
    assert run.block.names == ()


def test_a_statement_entered_thousands_of_times(trace: Any) -> None:
    total = 0
    for i in range(2_000):
        with trace():
            total = total + i
            total.save()

    assert total == sum(range(2_000))
