"""Saved values that a body keeps only in an object from outside, of which the worker has a copy."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSequence, MutableSet
from contextlib import suppress
from types import MemberDescriptorType, WrapperDescriptorType
from typing import TYPE_CHECKING, Any, NamedTuple

from nnsight_async.capture.rewrite import is_named, is_save, is_save_function
from nnsight_async.capture.scope import mangle
from nnsight_async.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Collection
    from collections.abc import Set as AbstractSet

    from nnsight_async.capture.source import Source

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
MUTATORS = frozenset({"add", "append", "appendleft", "extend", "extendleft", "insert", "setdefault", "update"})
_CONTAINERS = (MutableMapping, MutableSequence, MutableSet)
_ARRAYS = frozenset({"numpy", "torch"})
_PACKAGE = __name__.partition(".")[0]


class Kept(NamedTuple):
    """A statement that puts a saved value into `holder`, or under its name, and nowhere else."""

    statement: ast.stmt
    holder: ast.expr
    attribute: str | None = None  # that is assigned

    @property
    def name(self) -> str:
        """The variable that `holder` starts from."""
        root = self.holder
        while isinstance(root, (ast.Attribute, ast.Subscript)):
            root = root.value
        return root.id if isinstance(root, ast.Name) else ""


def kept_outside(body: list[ast.stmt], outer: AbstractSet[str], saved: Collection[str]) -> tuple[Kept, ...]:
    """The statements of `body` that keep a saved value in one of the `outer` names that is not itself `saved`."""
    wanted = outer - set(saved)
    return tuple(kept for kept in changes(body, _saves) if kept.name in wanted)


def refuse(kept: tuple[Kept, ...], value_of: Callable[[str], Any], source: Source) -> None:
    """Raise `CaptureError` for the first of `kept` whose values would surely not come home."""
    for one in kept:
        with suppress(KeyError, IndexError, TypeError, ValueError):  # what it is, only the block will know
            holder = evaluated(one.holder, value_of)
            if is_copied(holder, one):
                raise CaptureError(_message(one, holder, source))


def changes(body: Iterable[ast.AST], puts: Callable[[ast.expr], bool] = lambda value: True) -> Iterator[Kept]:
    """Statements that put something into an object, if it `puts` what is wanted."""
    for node in body:
        yield from _changes(node, puts)
        yield from changes((c for c in ast.iter_child_nodes(node) if not isinstance(c, (*_SCOPES, ast.expr))), puts)


def _changes(node: ast.AST, puts: Callable[[ast.expr], bool]) -> Iterator[Kept]:
    match node:
        case ast.Expr(ast.Call(ast.Attribute(holder, method), arguments, keywords)) if method in MUTATORS:
            if any(map(puts, [*arguments, *(keyword.value for keyword in keywords)])):
                yield Kept(node, holder)
        case ast.Assign(targets, value) if puts(value) and not any(isinstance(t, ast.Name) for t in targets):
            yield from (kept for target in targets for kept in _changed(node, target))
        case ast.AnnAssign(target, _, ast.expr() as value) if puts(value):
            yield from _changed(node, target)
        case ast.AugAssign(target, _, value) if puts(value):
            yield from [Kept(node, target)] if isinstance(target, ast.Name) else _changed(node, target)
        case _:
            pass


def _changed(statement: ast.stmt, target: ast.expr) -> Iterator[Kept]:
    match target:
        case ast.Subscript(holder):
            yield Kept(statement, holder)
        case ast.Attribute(holder, attribute):
            yield Kept(statement, holder, attribute)
        case _:
            pass


def _saves(value: ast.AST) -> bool:
    """Whether something is saved in an expression, and not under a name of its own."""
    if isinstance(value, (ast.NamedExpr, ast.Lambda)):
        return False
    if isinstance(value, ast.expr) and (is_save(value) or is_save_function(value)):
        return not is_named(value)
    return any(map(_saves, ast.iter_child_nodes(value)))


def evaluated(holder: ast.expr, value_of: Callable[[str], Any]) -> Any:
    """The object, as far as looking it up runs no code of the user's; KeyError, IndexError or TypeError otherwise."""
    match holder:
        case ast.Name(name):
            return value_of(name)
        case ast.Attribute(inner, attribute):
            owner = evaluated(inner, value_of)
            names = (mangle(attribute, kind.__name__) for kind in type(owner).__mro__)
            return vars(owner)[next((name for name in names if name in vars(owner)), attribute)]
        case ast.Subscript(inner, ast.Constant(index)):
            found = evaluated(inner, value_of)
            return found[index] if type(found) in (dict, list, tuple) else {}[index]
        case _:
            raise KeyError(holder)


def is_copied(holder: Any, kept: Kept) -> bool:
    """Whether the block changes a copy of `holder`: not a module of the model, or code that may do something else."""
    kind: Any = type(holder)
    if hasattr(kind, "__block_reference__") or kind.__module__.partition(".")[0] == _PACKAGE:
        return False
    if kept.attribute is not None:
        declared = getattr(kind, kept.attribute, None)
        plain = isinstance(declared, MemberDescriptorType) or not hasattr(declared, "__set__")
        return plain and isinstance(kind.__setattr__, WrapperDescriptorType)  # not one in Python
    if isinstance(kept.statement, ast.AugAssign) and kept.holder is kept.statement.target:
        return True
    return isinstance(holder, _CONTAINERS) or kind.__module__.partition(".")[0] in _ARRAYS


def _message(kept: Kept, holder: Any, source: Source) -> str:
    line = kept.statement.lineno
    return (
        f"{source.filename}, line {line}: what is saved here would be lost, because {kept.name!r} is bound "
        f"outside the block, which has a copy of it. {_advice(kept, holder)}\n"
        f"    {source.line(line)}"
    )


def _advice(kept: Kept, holder: Any) -> str:
    if isinstance(kept.holder, ast.Name) and kept.attribute is None and type(holder) in (list, dict):
        empty = "[]" if type(holder) is list else "{}"
        return (
            f"Write `{kept.name} = save({empty})` in the block and fill it without `.save()`: after the `with`, "
            f"{kept.name!r} is what it has become."
        )
    return "Assign it to a name in the block, `value = ....save()`, and put that where it belongs after the `with`."
