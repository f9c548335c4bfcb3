"""Values are written into the variables of the caller, of every kind."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from nnsight_async.capture.bind import bind

NONE: frozenset[str] = frozenset()


def test_a_local_variable() -> None:
    x = 1
    bind(sys._getframe(), {"x": 2}, NONE)

    assert x == 2


def test_a_local_variable_that_had_no_value() -> None:
    bind(sys._getframe(), {"x": 2}, NONE)
    if False:
        x = 0

    assert x == 2


def test_a_variable_that_an_inner_function_shares() -> None:
    x = 1

    def inner() -> int:
        return x

    bind(sys._getframe(), {"x": 2}, NONE)

    assert (x, inner()) == (2, 2)


def test_a_variable_of_the_function_around() -> None:
    x = 1

    def inner() -> None:
        nonlocal x
        bind(sys._getframe(), {"x": 2}, NONE)

    inner()

    assert x == 2


def test_other_variables_keep_their_values() -> None:
    x, y = 1, [0]
    bind(sys._getframe(), {"x": 2}, NONE)
    y.append(1)
    y = [*y, 2]

    assert (x, y) == (2, [0, 1, 2])


def test_a_module_variable() -> None:
    namespace: dict[str, Any] = {"bind": bind, "sys": sys}
    exec("bind(sys._getframe(), {'x': 2}, frozenset())\ny = x + 1", namespace)

    assert (namespace["x"], namespace["y"]) == (2, 3)


def test_a_class_variable() -> None:
    class C:
        bind(sys._getframe(), {"x": 2}, NONE)

    assert C.x == 2  # type: ignore[attr-defined]


def test_a_name_that_the_function_declares_global() -> None:
    namespace: dict[str, Any] = {"bind": bind, "sys": sys}
    exec("def f():\n    global x\n    bind(sys._getframe(), {'x': 2}, frozenset({'x'}))\n    return x\n", namespace)

    assert (namespace["f"](), namespace["x"]) == (2, 2)


def test_a_name_that_the_code_does_not_have_is_left_out() -> None:
    bind(sys._getframe(), {"elsewhere": 2}, NONE)

    assert "elsewhere" not in locals()


def test_a_trace_function_does_not_undo_it() -> None:
    before = sys.gettrace()
    seen = []

    def debugger(frame: Any, event: str, arg: Any) -> Any:
        seen.append(frame.f_locals.get("x"))
        return debugger

    def run() -> int:
        x = 1
        bind(sys._getframe(), {"x": 2}, NONE)
        y = x
        return x + y

    sys.settrace(debugger)
    try:
        result = run()
    finally:
        sys.settrace(before)

    assert result == 4
    assert seen[-1] == 2


@pytest.mark.parametrize("name", ["x", "y"])
def test_an_unbound_variable_stays_unbound(name: str) -> None:
    bind(sys._getframe(), {"name": "z"}, NONE)
    if False:
        x = y = 0

    assert name == "z"
    with pytest.raises(UnboundLocalError):
        print(x)
    with pytest.raises(UnboundLocalError):
        print(y)
