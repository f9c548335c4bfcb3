from __future__ import annotations

import ast
import dis
import inspect
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from nnsight_async.capture.agree import agree
from nnsight_async.capture.source import Source, changed, future_flags, source_of
from nnsight_async.capture.stop import ENTERING, Stop, stop_of
from nnsight_async.capture.unlisted import nested_codes
from nnsight_async.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType, FrameType

With = ast.With | ast.AsyncWith
Position = tuple[int | None, int | None, int | None, int | None]


@dataclass(frozen=True, slots=True, eq=False)
class Statement:
    """One `with` statement of a running code object."""

    source: Source
    node: With
    function: str
    qualname: str
    flags: int  # of the `from __future__` imports in force
    stop: Stop
    around: ast.AST  # the function, class or module that it is part of
    class_name: str | None  # the class whose private names (`__x`) the body can write
    local_names: frozenset[str]
    declared_global: frozenset[str]  # by a `global` statement of the function around it


def find(frame: FrameType) -> Statement:
    """The `with` statement that `frame` is entering; CaptureError if there is none or its text cannot be had."""
    code, index = frame.f_code, frame.f_lasti // 2
    if dis.opname[code.co_code[frame.f_lasti]] not in ENTERING:
        raise CaptureError(
            f"{code.co_filename}, line {frame.f_lineno}: a trace must be entered by a `with` statement, because the "
            "body of the statement is the block. Without one, use model.run(prompt, probe) with "
            "def probe(model, tracer): ..."
        )
    positions = list(code.co_positions())
    source = source_of(code, frame.f_globals)
    path = _path(source.tree, positions[index], code)
    node = path[-1]
    assert isinstance(node, With)
    if not any(agree(code, other, node, source.tree) for other in _compiled(source, positions[index], path[1])):
        raise changed(code, node.lineno)
    around = _function_around(path)
    return Statement(
        source=source,
        node=node,
        function=code.co_name,
        qualname=code.co_qualname,
        flags=future_flags(code),
        stop=stop_of(code, frame.f_lasti, positions, node),
        around=around,
        class_name=next((item.name for item in reversed(path) if isinstance(item, ast.ClassDef)), None),
        local_names=frozenset((*code.co_varnames, *code.co_cellvars, *code.co_freevars)),
        declared_global=frozenset(_declared_global(around)),
    )


def _path(tree: ast.Module, position: Position, code: CodeType) -> list[ast.AST]:
    found = list(_search(tree, position, []))
    if not found:
        raise changed(code, position[0] or code.co_firstlineno)
    if len(found) > 1:
        raise CaptureError(
            f"{code.co_filename}, line {position[0]}: several `with` statements share this line, and Python runs with "
            "-X no_debug_ranges, which hides which of them is entered. Put each on its own line."
        )
    return found[0]


def _search(node: ast.AST, position: Position, path: list[ast.AST]) -> Iterator[list[ast.AST]]:
    path = [*path, node]
    if isinstance(node, With) and _is_entered_at(node, position):
        yield path
    line = position[0] or 0
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt) or child.lineno <= line <= (child.end_lineno or line):
            yield from _search(child, position, path)


def _is_entered_at(node: With, position: Position) -> bool:
    # up to Python 3.12 entering carries the position of the statement, from 3.13 that of the context expression
    places = (node, *(item.context_expr for item in node.items))
    if position[2] is None:
        return any(place.lineno == position[0] for place in places)
    return any((p.lineno, p.end_lineno, p.col_offset, p.end_col_offset) == position for p in places)


def _compiled(source: Source, position: Position, statement: ast.AST) -> Iterator[CodeType]:
    """The codes of the present text that enter a `with` at this position: one, if the text did not change.

    IPython compiles each top-level `statement` of a cell alone, and a prompt does so in a mode of its own.
    """
    for code in chain([source.module], source.alone(statement)):
        yield from (inner for inner in nested_codes(code) if _enters_at(inner, position))


def _enters_at(code: CodeType, position: Position) -> bool:
    if code.co_firstlineno > (position[0] or 0):
        return False
    entering = (i for i, p in enumerate(code.co_positions()) if p == position)
    return any(dis.opname[code.co_code[2 * i]] in ENTERING for i in entering)


def _function_around(path: list[ast.AST]) -> ast.AST:
    scopes = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    return next(node for node in reversed(path) if isinstance(node, scopes))


def _declared_global(scope: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, ast.Global):
            yield from child.names
        elif not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _declared_global(child)


def is_optimized(code: CodeType) -> bool:
    """Whether this is the code of a function: its locals are slots, not a dict."""
    return bool(code.co_flags & inspect.CO_OPTIMIZED)
