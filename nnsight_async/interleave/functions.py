"""The Python function that runs when something is called, and the same call with another function in its place."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple, cast

import torch

from nnsight_async.errors import UnreadableError
from nnsight_async.interleave.text import parsed

Call = Callable[..., Any]
Put = Callable[[FunctionType], Call]


class Reached(NamedTuple):
    """A function, the object that it is a method of, and how to call another function in the same way.

    To be unpacked: a type checker takes a function that is an attribute for a method.
    """

    function: FunctionType
    owner: object
    put: Put


def reach(callee: object) -> Reached:
    """Look through methods, partials, decorators and methods that only hand on.

    Raises `UnreadableError` if there is no Python function behind them.
    """
    match callee:
        case MethodType():
            return _method(callee)
        case functools.partial():
            args, kwargs = callee.args, callee.keywords
            function, owner, put = reach(callee.func)
            return Reached(function, owner, _outside(put, lambda call: functools.partial(call, *args, **kwargs)))
        case FunctionType():
            return _function(callee)
        case _:
            raise UnreadableError(_not_a_function(callee))


def _method(method: MethodType) -> Reached:
    onward = _handed_on(method)
    if onward is not None:
        return reach(onward)
    owner = method.__self__
    function, _, put = reach(method.__func__)
    return Reached(function, owner, _outside(put, lambda call: MethodType(call, owner)))


def _function(function: FunctionType) -> Reached:
    if hasattr(function, "_torchdynamo_orig_callable"):
        raise UnreadableError(f"{called(function)} is compiled by torch.compile and does not run as Python")
    wrapped = function.__dict__.get("__wrapped__")
    if wrapped is None:
        return Reached(function, None, _itself)
    contents = [_content(cell) for cell in function.__closure__ or ()]
    index = next((index for index, content in enumerate(contents) if content is wrapped), None)
    if index is None:
        raise UnreadableError(f"{called(function)} is wrapped by a decorator that does not show the function it calls")
    innermost, owner, put = reach(wrapped)
    return Reached(innermost, owner, _outside(put, lambda call: _with_cell(function, index, call)))


def _itself(new: FunctionType) -> Call:
    return new


def _outside(put: Put, around: Callable[[Call], Call]) -> Put:
    def outside(new: FunctionType) -> Call:
        return around(put(new))

    return outside


def _handed_on(method: MethodType) -> object:
    """What a method whose whole body is `return self.NAME(*args, **kwargs)` calls, else None.

    vLLM's `CustomOp.forward` is such a one (0.32, 0.33): the method of the platform is in an attribute of the instance.
    """
    function = method.__func__
    names: tuple[str, ...] = function.__code__.co_names if isinstance(function, FunctionType) else ()
    if len(names) != 1 or function.__code__.co_argcount != 1 or "__wrapped__" in function.__dict__:
        return None
    statements = [part for part in parsed(function.__code__).node.body if not _is_docstring(part)]
    own, *rest = function.__code__.co_varnames
    wanted = f"return {own}.{names[0]}(*{', **'.join(rest)})"
    if len(statements) != 1 or ast.unparse(statements[0]) != wanted:
        return None
    return getattr(method.__self__, names[0], None)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _with_cell(function: FunctionType, index: int, content: object) -> FunctionType:
    cells = list(function.__closure__ or ())
    cells[index] = CellType(content)
    return copied(function, function.__code__, tuple(cells))


def copied(function: FunctionType, code: Any, closure: tuple[CellType, ...]) -> FunctionType:
    """A function like `function` that runs `code` over `closure`."""
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__qualname__ = function.__qualname__
    copy.__module__ = function.__module__
    return copy


def _not_a_function(callee: object) -> str:
    if isinstance(callee, torch.nn.Module):
        return f"it calls a module ({type(callee).__name__}), whose own .source lists its operations"
    if isinstance(callee, type):
        return f"{called(callee)} is a class, not a function"
    if callable(callee) and hasattr(callee, "__name__"):
        return f"{called(callee)} is not written in Python"
    return f"it calls an object ({type(callee).__module__}.{type(callee).__qualname__}) and not a Python function"


def called(callee: object) -> str:
    """What a function or class is called, with its module."""
    named = cast("Any", callee)
    module = getattr(named, "__module__", None)
    kind = "__qualname__" if isinstance(callee, type | FunctionType) else "__name__"
    name = getattr(named, kind, None) or repr(callee)
    return f"{module}.{name}" if module else str(name)
