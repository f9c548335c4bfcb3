"""Objects from outside that a body puts something into, which stays in the copy that the worker has."""

from __future__ import annotations

import ast
import warnings
from collections import Counter
from contextlib import suppress
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

from nnsight_async.capture.kept import Kept, changes, evaluated, is_copied
from nnsight_async.capture.rewrite import is_save, is_save_function, is_save_method

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from collections.abc import Set as AbstractSet


_PLACES = (ast.Name, ast.Attribute, ast.Subscript)


class Filled(NamedTuple):
    """A statement that changes such an object, and the first line behind the block that reads it, if there is one."""

    change: Kept
    line: int | None
    beside: frozenset[str]
    """The names in the block."""


def filled(
    body: list[ast.stmt], outer: AbstractSet[str], saved: Collection[str], around: ast.AST | None = None
) -> tuple[Filled, ...]:
    """What `body` changes of the `outer` names and does not save, and is read behind it, or at least not in it."""
    wanted = outer - set(saved) - set(_saved_in(body))
    found = [change for change in changes(body) if change.name in wanted]
    if not found:
        return ()
    uses = {} if around is None else _uses(around, body[-1].end_lineno or 0)
    named = Counter(node.id for node in ast.walk(ast.Module(body, [])) if isinstance(node, ast.Name))
    changed = Counter(change.name for change in found)
    first = {ast.dump(_place(change)): change for change in reversed(found)}
    return tuple(
        Filled(change, uses.get(place), frozenset(named))
        for place, change in reversed(first.items())
        if place in uses or named[change.name] == changed[change.name]
    )


def _uses(around: ast.AST, end: int) -> dict[str, int]:
    """The first line behind `end` for each place that is read there."""
    uses: dict[str, int] = {}
    for node in ast.walk(around):
        if isinstance(node, _PLACES) and isinstance(node.ctx, ast.Load) and node.lineno > end:
            place = ast.dump(node)
            uses[place] = min(node.lineno, uses.get(place, node.lineno))
    return uses


def lost(found: Iterable[Filled], value_of: Callable[[str], Any], home: Collection[str] = ()) -> Iterator[Lost]:
    """Those of objects that a block has copies of; the variables `home` come home."""
    for one in found:
        change = one.change
        with suppress(KeyError, IndexError, TypeError, ValueError):  # what it is, only the block will know
            holder = evaluated(change.holder, value_of)
            rebound = isinstance(change.holder, ast.Name) and change.name in home
            if is_copied(holder, change) and not rebound and (one.line or not _is_read_by(one, value_of)):
                yield Lost(change.statement.lineno, _message(one, holder))


class Lost(NamedTuple):
    """The line of a change, and what is to be said of it."""

    line: int
    message: str


def warn(lost: Iterable[Lost], filename: str, namespace: dict[str, Any], line: int | None = None) -> None:
    """Warn of changes, at `line` if there is one, and otherwise where they are."""
    for one in lost:
        seen = namespace.setdefault("__warningregistry__", {})
        warnings.warn_explicit(one.message, UserWarning, filename, line or one.line, registry=seen)


def _is_read_by(one: Filled, value_of: Callable[[str], Any]) -> bool:
    """Whether a function that the block names reads the object under the same name."""
    for name in one.beside:
        with suppress(KeyError, ValueError):
            code = getattr(value_of(name), "__code__", None)
            if isinstance(code, CodeType) and one.change.name in (*code.co_names, *code.co_freevars):
                return True
    return False


def _message(one: Filled, holder: Any) -> str:
    place, name = ast.unparse(_place(one.change)), one.change.name
    if place == name and type(holder) in (list, dict, int, float, str):
        instead = f"Write `{name}.save()` in the block, behind that, and {name!r} is what it has become."
    else:
        instead = "Assign it to a name in the block, `value = ....save()`, and put that there after the `with`."
    use = "" if one.line is None else f", and line {one.line} does not see it"
    return (
        f"line {one.change.statement.lineno} changes {place!r} in the block, where it is a copy, because {name!r} is "
        f"bound outside it: what is put there does not come home{use}. {instead}"
    )


def _place(change: Kept) -> ast.expr:
    """The expression that somebody has to read to see the change."""
    if change.attribute is None:
        return _read(change.holder)
    return ast.Attribute(_read(change.holder), change.attribute, ast.Load())


def _read(holder: ast.expr) -> ast.expr:
    match holder:
        case ast.Name(name):
            return ast.Name(name, ast.Load())
        case ast.Attribute(value, attribute):
            return ast.Attribute(value, attribute, ast.Load())
        case ast.Subscript(value, index):
            return ast.Subscript(value, index, ast.Load())
        case _:
            return holder


def _saved_in(body: list[ast.stmt]) -> Iterator[str]:
    """Variables that are saved somewhere in the body, under whatever name."""
    for node in ast.walk(ast.Module(body, [])):
        if isinstance(node, ast.Call):
            if is_save(node) or is_save_method(node):
                yield from _names(node.func)
            if is_save_function(node) or _is_save_as(node):
                yield from _names(node.args[0])


def _is_save_as(node: ast.Call) -> bool:
    """`save(EXPR, NAME)`, `tracer.save(EXPR, NAME)`."""
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    return name == "save" and bool(node.args)


def _names(node: ast.expr) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
