"""Where to raise so that the body of a `with` does not run and the statement's own exit sees the exception."""

from __future__ import annotations

import ast
import dis
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nnsight_async.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType

    from nnsight_async.capture.find import Position, With

ENTERING = frozenset({"BEFORE_WITH", "BEFORE_ASYNC_WITH"})


@dataclass(frozen=True, slots=True)
class Stop:
    """Raise before any instruction at `offsets`; none means that the body was compiled to nothing."""

    offsets: frozenset[int]
    opcodes: bool  # whether no line begins there, so that each instruction has to be watched
    target: str | None = None  # what `as` would have assigned: the assignment itself is not reached


def stop_of(code: CodeType, entered: int, positions: list[Position], node: With) -> Stop:
    """Where to stop `node`, whose context manager is being entered by the instruction at `entered`."""
    body = frozenset(_body_offsets(code, positions, node))
    last = max((i.offset for i in dis.get_instructions(code) if i.offset < min(body, default=0)), default=0)
    if not body or _handler(code, min(body)) == _handler(code, last):
        return Stop(body, opcodes=_header_end(node)[0] == _first_line(node.body[0]))
    # The body begins with `try`: what is raised at its first instruction belongs to the handlers of the `try`, or to
    # nobody at all (3.11 to 3.13 protect the `try` itself by nothing). So stop at the last instruction of the header.
    target = node.items[-1].optional_vars
    if target is None:
        return Stop(frozenset({last}), opcodes=True)
    if isinstance(target, ast.Name) and not _enters_another(code, entered, last):
        return Stop(frozenset({last}), opcodes=True, target=target.id)
    raise CaptureError(
        f"{code.co_filename}, line {node.lineno}: this body begins with `try`, and Python cannot skip it after "
        f"`as {ast.unparse(target)}`. Put a statement before the `try`, such as an assignment."
    )


def _body_offsets(code: CodeType, positions: list[Position], node: With) -> Iterator[int]:
    start, end = _header_end(node), (node.end_lineno or 0, node.end_col_offset or 0)
    if all(position[2] is None for position in positions):
        yield from _body_offsets_by_line(code, positions, node)
        return
    for index, (line, end_line, column, end_column) in enumerate(positions):
        if line is None or end_line is None or column is None or end_column is None:
            continue
        if start <= (line, column) and (end_line, end_column) <= end:
            yield 2 * index


def _body_offsets_by_line(code: CodeType, positions: list[Position], node: With) -> Iterator[int]:
    first, last = _first_line(node.body[0]), node.end_lineno or 0
    if first <= _header_end(node)[0]:
        raise CaptureError(
            f"{code.co_filename}, line {node.lineno}: the body of this `with` begins on the line of its header, "
            "and Python runs with -X no_debug_ranges, which hides where. Put the body on its own line."
        )
    yield from (2 * i for i, position in enumerate(positions) if position[0] and first <= position[0] <= last)


def _header_end(node: With) -> tuple[int, int]:
    last = node.items[-1].optional_vars or node.items[-1].context_expr
    return last.end_lineno or 0, last.end_col_offset or 0


def _first_line(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def _enters_another(code: CodeType, entered: int, last: int) -> bool:
    return any(entered < i.offset < last and i.opname in ENTERING for i in dis.get_instructions(code))


def _handler(code: CodeType, offset: int) -> int | None:
    """Where an exception raised at `offset` goes (the format is in CPython's exception_handling_notes.txt)."""
    numbers = _varints(code.co_exceptiontable)
    for start in numbers:
        length, target, _depth = next(numbers), next(numbers), next(numbers)
        if start <= offset // 2 < start + length:
            return target
    return None


def _varints(table: bytes) -> Iterator[int]:
    value = 0
    for byte in table:
        value = value << 6 | byte & 63
        if not byte & 64:
            yield value
            value = 0
