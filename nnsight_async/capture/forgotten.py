"""Names that a body assigns and does not save, although the code around it uses them."""

from __future__ import annotations

import ast
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from nnsight_async.capture.live import assigned_in

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from types import FrameType

    from nnsight_async.capture.find import Statement


class Forgotten(NamedTuple):
    """A name that nothing but the body assigns, and the first line after it that reads it."""

    name: str
    line: int


def forgotten(statement: Statement, saved: Collection[str]) -> tuple[Forgotten, ...]:
    """What will be unbound after the `with`, and is read there."""
    body = statement.node.body
    wanted = assigned_in(body) - set(saved)
    if not wanted:
        return ()
    rest = list(_outside(statement.around, body))
    wanted -= {name for node in rest for name in _bound(node)}
    used: dict[str, int] = {}
    for node in rest:
        if isinstance(node, ast.Name) and node.id in wanted and node.lineno > (statement.node.end_lineno or 0):
            used[node.id] = min(node.lineno, used.get(node.id, node.lineno))
    return tuple(Forgotten(name, line) for name, line in sorted(used.items()))


def carried(statement: Statement, saved: Collection[str]) -> tuple[str, ...]:
    """What the body assigns, does not save, and is read anywhere around it, blocks included."""
    body = statement.node.body
    wanted = assigned_in(body) - set(saved)
    read = {node.id for node in _around(statement.around, body) if isinstance(node, ast.Name) and _is_read(node)}
    return tuple(sorted(wanted & read))


def warn(found: tuple[Forgotten, ...], value_of: Callable[[str], Any], frame: FrameType, line: int) -> None:
    """Warn at the statement of those names that have no value there either."""
    for name, use in found:
        try:
            value_of(name)
        except KeyError:
            seen = frame.f_globals.setdefault("__warningregistry__", {})
            message = (
                f"line {use} uses {name!r}, which the block of this `with` assigns and does not save: it will not be "
                f"bound there. Write `{name}.save()` in the block, or save what is assigned: `{name} = ....save()`."
            )
            warnings.warn_explicit(message, UserWarning, frame.f_code.co_filename, line, registry=seen)


def _outside(node: ast.AST, body: list[ast.stmt]) -> Iterator[ast.AST]:
    """All of the code around but `body`, and the bodies of invokes: those are blocks, which may share names."""
    for child in ast.iter_child_nodes(node):
        if not any(child is statement for statement in body):
            yield child
            yield from _outside(child, [*body, *child.body] if _is_invoke(child) else body)


def _around(node: ast.AST, body: list[ast.stmt]) -> Iterator[ast.AST]:
    """All of the code around but `body`."""
    for child in ast.iter_child_nodes(node):
        if not any(child is statement for statement in body):
            yield child
            yield from _around(child, body)


def _is_read(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)


def _is_invoke(node: ast.AST) -> TypeGuard[ast.With | ast.AsyncWith]:
    return isinstance(node, (ast.With, ast.AsyncWith)) and any(
        isinstance(item.context_expr, ast.Call)
        and isinstance(item.context_expr.func, ast.Attribute)
        and item.context_expr.func.attr == "invoke"
        for item in node.items
    )


def _bound(node: ast.AST) -> Iterator[str]:
    """Names that a node may bind, in whatever scope."""
    match node:
        case ast.Name(name, ast.Store() | ast.Del()) | ast.arg(name):
            yield name
        case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
            yield name
        case ast.ExceptHandler(_, str(name)) | ast.MatchAs(_, str(name)) | ast.MatchStar(str(name)):
            yield name
        case ast.MatchMapping(rest=str(name)):
            yield name
        case ast.alias(name, asname):
            yield asname or name.partition(".")[0]
        case ast.Global(names) | ast.Nonlocal(names):
            yield from names
        case _:
            pass
