"""Blocks of few forms, as data: what they read, save and change, told from their text.

A step of such a block can be done for many requests at once, without running its code for each (`interleave/plan.py`).
Any other form, and the block is Python as it stands.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

Form = tuple[Any, ...]
"""A statement or an expression: what it is, and its parts. Of tuples, strings, numbers and None alone."""

PLAIN = "__nnsight_plain__"
"""The attribute of a block that has its text as data, where it is of few forms."""

SIGNS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
BUILTINS = frozenset({"enumerate", "list"})
"""What the forms name by itself; in a block that assigns such a name, it is another's."""


class _Other(Exception):  # noqa: N818 -- not raised to anybody
    """Something that is none of the forms."""


def plain(body: list[ast.stmt], class_name: str | None = None) -> tuple[Form, ...] | None:
    """The statements of a block as data, or None where one is none of these:

    - `NAME = EXPR`, `NAME = EXPR.save()`, `NAME.save()`, `save(EXPR, NAME)`, `tracer.save(EXPR, NAME)`;
    - `EXPR += EXPR` (and `-=`, `*=`, `/=`), `EXPR[...] = EXPR`;
    - `NAME = [].save()` and `NAME.append(EXPR)`;
    - `for NAME in EXPR` and `for NAME, NAME in enumerate(EXPR)`, and, as the last, one over the steps of the tracer.

    Expressions are names, attributes, items, numbers, strings, and what `+ - * /` make of them.
    """
    try:
        return _statements(body, class_name)
    except _Other:
        return None


def _statements(body: list[ast.stmt], class_name: str | None = None) -> tuple[Form, ...]:
    if class_name is not None:  # where names may be private
        raise _Other
    found = [_statement(statement) for statement in body if not _says_nothing(statement)]
    if any(form[0] == "steps" for form in found[:-1]) or BUILTINS & assigned(found):
        raise _Other
    return tuple(found)


def assigned(forms: Iterable[Form]) -> set[str]:
    """The names that statements assign, those in loops too."""
    found: set[str] = set()
    for form in forms:
        match form:
            case ("let" | "list", _, name, *_):
                found.add(name)
            case ("save", *_, str(name)):
                found.add(name)
            case ("each", _, names, _, body):
                found |= {*names} | assigned(body)
            case ("steps", _, name, _, _, body):
                found |= {name} | assigned(body)
            case _:
                pass
    return found


def _says_nothing(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def _statement(statement: ast.stmt) -> Form:
    line = statement.lineno
    if not isinstance(statement, ast.For):
        _check_line(statement, line)
    match statement:
        case ast.Assign([ast.Name(name)], value):
            return _assigned(name, value, line)
        case ast.Assign([ast.Subscript() as target], value):
            return "change", line, "=", _expression(target), _expression(value)
        case ast.AugAssign(ast.Subscript() | ast.Attribute() as target, sign, value) if type(sign) in SIGNS:
            return "change", line, SIGNS[type(sign)], _expression(target), _expression(value)
        case ast.Expr(ast.Call() as call):
            return _call(call, line)
        case ast.For(ast.Name(name), each, inner, []):
            return _loop((name,), each, inner, line)
        case ast.For(
            ast.Tuple([ast.Name(number), ast.Name(name)]), ast.Call(ast.Name("enumerate"), [each], []), inner, []
        ):
            return _loop((number, name), each, inner, line)
        case _:
            raise _Other


def _check_line(statement: ast.stmt, line: int) -> None:
    """An error in a statement of several lines is said to be in one of them."""
    if any(getattr(node, "lineno", line) != line for node in ast.walk(statement)):
        raise _Other


def _assigned(name: str, value: ast.expr, line: int) -> Form:
    match value:
        case ast.Call(ast.Attribute(ast.List([]) | ast.Call(ast.Name("list"), [], []), "save"), [], []):
            return "list", line, name, "list" if isinstance(value.func.value, ast.Call) else None  # type: ignore[attr-defined]
        case ast.Call(ast.Attribute(saved, "save"), [], []):
            return "save", line, None, ("constant", name), _expression(saved), name
        case _:
            return "let", line, name, _expression(value)


def _call(call: ast.Call, line: int) -> Form:
    match call:
        case ast.Call(ast.Attribute(ast.Name(name), "save"), [], []):
            return "save", line, None, ("constant", name), ("name", name), None
        case ast.Call(ast.Attribute(ast.Name(name), "append"), [value], []):
            return "append", line, name, _expression(value)
        case ast.Call(function, [value, name], []) | ast.Call(function, [value], [ast.keyword("name", name)]):
            return "save", line, _saver(function), _expression(name), _expression(value), None
        case _:
            raise _Other


def _saver(function: ast.expr) -> Form:
    if isinstance(function, ast.Attribute) and function.attr == "save":
        return "method", _expression(function.value)
    if isinstance(function, ast.Name):
        return "function", _expression(function)
    raise _Other


def _loop(names: tuple[str, ...], each: ast.expr, body: list[ast.stmt], line: int) -> Form:
    match each:
        case ast.Subscript(ast.Attribute(tracer, "iter"), steps) if len(names) == 1:
            return "steps", line, names[0], _expression(tracer), _key(steps), _inner(body)
        case ast.Call(ast.Attribute(tracer, "all"), [], []) if len(names) == 1:
            every = "slice", None, None, None
            return "steps", line, names[0], _expression(tracer), every, _inner(body)
        case _:
            return "each", line, names, _expression(each), _inner(body)


def _inner(body: list[ast.stmt]) -> tuple[Form, ...]:
    """Statements of a loop, without one over steps among them."""
    found = _statements(body)
    if found and found[-1][0] == "steps":
        raise _Other
    return found


def _expression(node: ast.expr) -> Form:
    match node:
        case ast.Name(name):
            return "name", name
        case ast.Constant(value) if value is None or type(value) in (int, float, str):
            return "constant", value
        case ast.UnaryOp(ast.USub(), operand):
            return "negative", _expression(operand)
        case ast.Attribute(value, name) if not name.startswith("__"):
            return "attribute", _expression(value), name
        case ast.Subscript(value, key):
            return "item", _expression(value), _key(key)
        case ast.BinOp(left, sign, right) if type(sign) in SIGNS:
            return "binary", SIGNS[type(sign)], _expression(left), _expression(right)
        case ast.JoinedStr(parts):
            return "text", tuple(map(_text, parts))
        case _:
            raise _Other


def _text(part: ast.expr) -> Form:
    match part:
        case ast.Constant(str(text)):
            return "constant", text
        case ast.FormattedValue(value, -1, None):
            return _expression(value)
        case _:
            raise _Other


def _key(node: ast.expr) -> Form:
    match node:
        case ast.Slice(start, stop, step):
            return "slice", *(None if part is None else _expression(part) for part in (start, stop, step))
        case ast.Tuple(parts):
            if any(isinstance(part, ast.Tuple) for part in parts):  # a list of numbers, whose items are copied
                raise _Other
            return "keys", tuple(map(_key, parts))
        case ast.Constant(value) if value is Ellipsis:
            return ("rest",)
        case _:
            return _expression(node)
