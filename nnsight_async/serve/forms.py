"""Blocks that came as data, in the forms of those that need not run (`capture/plain.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nnsight_async.capture.plain import Form
from nnsight_async.serve import operations as ops

MODEL, TRACER = ".model", ".tracer"
"""What no name of a block is."""

SIGNS = frozenset("+-*/")


class _Other(Exception):  # noqa: N818 -- not raised to anybody
    """Something that is none of the forms."""


def forms(statements: Sequence[ops.Statement]) -> tuple[Form, ...] | None:
    """The statements in these forms; None where one has none."""
    names = {getattr(node, "name", None) for node in ops.nodes(list(statements))}
    if names & {MODEL, TRACER}:
        return None
    try:
        found = tuple(map(_statement, statements))
    except _Other:
        return None
    return None if any(form[0] == "steps" for form in found[:-1]) else found


def _statement(statement: ops.Statement) -> Form:
    line = statement.line
    match statement:
        case ops.Let(name, value):
            return "let", line, name, _expression(value)
        case ops.Save(name, value):
            return "save", line, None, ("constant", name), _expression(value), None
        case ops.Change(ops.Item() as place, by, value):
            return "change", line, by, _expression(place), _expression(value)
        case ops.Change(ops.Read() as place, by, value) if by != "=":
            return "change", line, by, _expression(place), _expression(value)
        case ops.Steps() if statement.only is None:
            inner = tuple(map(_statement, statement.body))
            if any(form[0] == "steps" for form in inner):
                raise _Other
            steps = "slice", ("constant", statement.start), _constant(statement.stop), ("constant", statement.stride)
            return "steps", line, statement.name or "", ("name", TRACER), steps, inner
        case _:
            raise _Other


def _constant(value: int | None) -> Form | None:
    return None if value is None else ("constant", value)


def _expression(expression: Any) -> Form:
    match expression:
        case ops.Value():
            return "constant", expression.value
        case ops.Variable():
            return "name", expression.name
        case ops.Read():
            late = expression.part in ("logits", "samples")
            return "attribute", ("name", MODEL) if late else ("module", expression.path), expression.part
        case ops.Item():
            keys = tuple(map(_key, expression.keys))
            return "item", _expression(expression.of), keys[0] if len(keys) == 1 else ("keys", keys)
        case ops.Binary() if expression.sign in SIGNS:
            return "binary", expression.sign, _expression(expression.left), _expression(expression.right)
        case ops.Negative():
            return "negative", _expression(expression.of)
        case _:
            raise _Other


def _key(key: Any) -> Form:
    match key:
        case ops.Slice():
            ends = (key.start, key.stop, key.step)
            return "slice", *(None if end is None else _expression(end) for end in ends)
        case ops.Rest():
            return ("rest",)
        case _:
            return _expression(key)
