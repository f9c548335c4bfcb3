"""The text of a block as it travels: cut out where it stands, and compiled where it arrives, by whatever Python."""

from __future__ import annotations
import __future__

import ast
import marshal
from collections.abc import Sequence

from nnsight_async.capture.compile import Place, function_code
from nnsight_async.capture.rewrite import rewrite_saves
from nnsight_async.capture.text import Written
from nnsight_async.parse import parse

_ABOVE = "if 1:\n"
"""Has the statements stay where they are in their lines, and what several lines hold as it is."""

ANNOTATIONS = __future__.annotations.compiler_flag


def cut(lines: Sequence[str], body: Sequence[ast.stmt]) -> tuple[str, int] | None:
    """The lines of some statements, and which is the first; None where those hold more than that, or not all of it."""
    first = min(node.lineno for node in (body[0], *getattr(body[0], "decorator_list", ())))
    text = "".join(lines[first - 1 : body[-1].end_lineno])
    try:
        same = [ast.dump(node) for node in parsed(text, first)] == [ast.dump(node) for node in body]
    except (SyntaxError, ValueError, RecursionError):
        return None
    return (text, first) if same else None


def parsed(text: str, first_line: int) -> list[ast.stmt]:
    """The statements again, at the lines where they stood."""
    above, *more = parse(_ABOVE + text).body
    assert isinstance(above, ast.If)
    if above.orelse or more:
        raise SyntaxError("more than the body of a block")
    ast.increment_lineno(above, first_line - 2)
    return above.body


def code_of(written: Written, entries: Sequence[str], filename: str, function: str) -> bytes:
    """The marshalled code of a function that begins with values for `entries`; raises what is wrong with the text."""
    body, _ = rewrite_saves(parsed(written.text, written.first_line))
    flags = ANNOTATIONS if written.annotations else 0
    place = Place(filename, written.lines, function, written.qualname, written.class_name, flags)
    return marshal.dumps(function_code(body, (*written.parameters, *entries), place))
