"""A function whose calls are reported: the same text, compiled with every operation going through one more call."""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import CellType, CodeType, FunctionType
from typing import Any

from nnsight_async.interleave.functions import copied
from nnsight_async.interleave.operations import Operation, operations_of
from nnsight_async.interleave.text import Text, parsed

CALL = "__nnsight_call__"

Report = Callable[..., Any]
"""Called as `report(number of the operation, callee, *args, **kwargs)`; returns what the operation returns."""


class Instrument:
    """The operations of a function, and the function with all of them reported."""

    def __init__(self, text: Text) -> None:
        self.text = text
        self.operations = {operation.name: operation for operation in operations_of(text.node.body)}
        self._code: CodeType | None = None

    def reporting(self, function: FunctionType, report: Report) -> FunctionType:
        """`function`, which has this text, over the same globals, defaults and cells, with its calls reported."""
        code = self._code or self._compile()
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        cells[CALL] = CellType(report)
        return copied(function, code, tuple(cells[name] for name in code.co_freevars))

    def _compile(self) -> CodeType:
        for number, operation in enumerate(self.operations.values()):
            _report(number, operation)
        code = self._code = self.text.compile((CALL,))
        return code


def _report(number: int, operation: Operation) -> None:
    """Change `f(a)` to `__nnsight_call__(number, f, a)`: Python still evaluates the callee first."""
    node, callee = operation.node, operation.callee
    node.args = [ast.copy_location(ast.Constant(number), callee), callee, *node.args]
    node.func = ast.copy_location(ast.Name(CALL, ast.Load()), callee)


_known: dict[int, Instrument] = {}


def instrument(function: FunctionType) -> Instrument:
    """The instrument for the code of `function`; `UnreadableError` if its source cannot be had."""
    known = _known.get(id(function.__code__))
    if known is None:  # `parsed` keeps the code, so that its id stays its own
        known = _known[id(function.__code__)] = Instrument(parsed(function.__code__))
    return known
