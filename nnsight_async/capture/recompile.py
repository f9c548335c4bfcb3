"""Functions compiled again with their saves rewritten, where their source can be had."""

from __future__ import annotations

import ast
import weakref
from functools import partial
from inspect import CO_GENERATOR as GENERATOR
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from nnsight_async.capture import filled
from nnsight_async.capture.agree import Span, agree
from nnsight_async.capture.compile import attribute_names, global_reads
from nnsight_async.capture.filled import Filled
from nnsight_async.capture.kept import MUTATORS, Kept, kept_outside, refuse
from nnsight_async.capture.live import read_first
from nnsight_async.capture.plain import Form, plain
from nnsight_async.capture.rebound import rebound
from nnsight_async.capture.rewrite import CHANGED, SaveRewriter, rewrite_saves
from nnsight_async.capture.source import Source, source_of
from nnsight_async.capture.text import Text, Written
from nnsight_async.capture.written import ANNOTATIONS, cut
from nnsight_async.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterator

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class _Recompiled(NamedTuple):
    code: CodeType | None  # None: nothing changes, or its source cannot be had
    names: tuple[str, ...]
    kept: tuple[Kept, ...] = ()
    filled: tuple[Filled, ...] = ()
    source: Source | None = None


_NOTHING = _Recompiled(None, ())
_known: dict[tuple[int, bool], _Recompiled] = {}
_plain: dict[int, tuple[Form, ...] | None] = {}


def recompiled(function: FunctionType, *, named: bool) -> tuple[FunctionType, tuple[str, ...]]:
    """`function` with its saves rewritten, and the names they supply if `named`.

    Raises `CaptureError` if it saves something into an object from outside, of which the worker has a copy.
    """
    result, value_of = _of_code(function.__code__, function.__globals__, named), partial(_outer_value, function)
    if result.source is not None:
        refuse(result.kept, value_of, result.source)
        filled.warn(filled.lost(result.filled, value_of), result.source.filename, function.__globals__)
    if result.code is None:
        return function, ()
    return with_code(function, result.code), result.names


def text_of(probe: object, model: object) -> Text | None:
    """The text of a function of (model, tracer), where it can be had; its first name stands for `model`."""
    if not isinstance(probe, FunctionType) or probe.__code__.co_argcount != 2 or probe.__code__.co_kwonlyargcount:
        return None
    code = probe.__code__
    try:
        source = source_of(code, probe.__globals__)
    except CaptureError:
        return None
    node = next(_nodes(source.tree, code), None)
    if not isinstance(node, ast.FunctionDef) or code.co_flags & GENERATOR or _path(source, code, node) is None:
        return None
    names = recompiled(probe, named=True)[1]
    given = dict(zip(code.co_varnames, (model, TRACER), strict=False))

    def seen(name: str) -> Any:
        return given[name] if name in given else _outer_value(probe, name)

    return Text(
        body=node.body,
        seen=seen,
        names=names,
        filename=code.co_filename,
        first_line=code.co_firstlineno,
        function=probe.__qualname__,
        written=partial(_written, probe, source, node),
        attributes=attribute_names(code),
        rebound=partial(rebound, probe),
    )


def _written(probe: FunctionType, source: Source, node: ast.FunctionDef) -> Written | None:
    code = probe.__code__
    if code.co_flags & (CO_VARARGS | CO_VARKEYWORDS) or any(map(_is_bound_to_place, ast.walk(node))):
        return None
    found = cut(source.lines, node.body)
    if found is None:
        return None
    return Written(
        text=found[0],
        first_line=found[1],
        lines=(node.lineno, node.end_lineno or node.lineno),
        parameters=code.co_varnames[:2],
        free=(*code.co_freevars, *global_reads(code)),
        entries=(),
        qualname=probe.__qualname__,
        class_name=None,
        annotations=bool(source.flags & ANNOTATIONS),
        module=probe.__module__ or "",
    )


def _is_bound_to_place(node: ast.AST) -> bool:
    """Whether a node means something else in another function: a variable of the one around it, a private name."""
    name = getattr(node, "id", getattr(node, "attr", ""))
    return isinstance(node, ast.Nonlocal) or (isinstance(name, str) and name[:2] == "__" and name[-2:] != "__")


class TracerName:
    """What the tracer of a function's text stands for."""


TRACER = TracerName()


def with_code(function: FunctionType, code: CodeType) -> FunctionType:
    """A copy of `function` that runs `code`."""
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = function.__annotations__
    copy.__qualname__ = function.__qualname__
    copy.__module__ = function.__module__
    copy.__doc__ = function.__doc__
    copy.__dict__.update(function.__dict__)
    return copy


def plain_of(function: FunctionType) -> tuple[Form, ...] | None:
    """The text of a function of (model, tracer) as data, where it is of few forms and can be had."""
    code = function.__code__
    if id(code) not in _plain:
        _plain[id(code)] = _plain_of(function)
        weakref.finalize(code, _plain.pop, id(code), None)
    return _plain[id(code)]


def _plain_of(function: FunctionType) -> tuple[Form, ...] | None:
    code = function.__code__
    if code.co_argcount != 2 or code.co_kwonlyargcount or code.co_flags & (CO_VARARGS | CO_VARKEYWORDS | GENERATOR):
        return None
    try:
        source = source_of(code, function.__globals__)
    except CaptureError:
        return None
    node = next(_nodes(source.tree, code), None)
    if not isinstance(node, ast.FunctionDef) or any(map(_is_bound_to_place, ast.walk(node))):
        return None
    return plain(node.body) if _path(source, code, node) is not None else None


def _of_code(code: CodeType, namespace: dict[str, Any], named: bool) -> _Recompiled:
    key = (id(code), named)
    known = _known.get(key)
    if known is None:
        wanted = CHANGED | MUTATORS if named else CHANGED
        known = _known[key] = _recompile(code, namespace, named) if attribute_names(code) & wanted else _NOTHING
        weakref.finalize(code, _known.pop, key, None)
    return known


def _recompile(code: CodeType, namespace: dict[str, Any], named: bool) -> _Recompiled:
    try:
        source = source_of(code, namespace)
    except CaptureError:
        return _NOTHING
    node = next(_nodes(source.tree, code), None)
    path = _path(source, code, node) if node is not None else None
    if path is None:
        return _NOTHING
    tree = source.parse()
    rewriter = SaveRewriter(named=named)
    _rewrite(next(_nodes(tree, code)), rewriter)
    result = _follow(source.compile(tree), path)
    if not _same_call(result, code):
        return _NOTHING
    names = tuple(rewriter.names)
    if node is None or isinstance(node, ast.Lambda):
        return _Recompiled(result, names)
    outer = read_first(node.body)[0] - {*code.co_varnames, *code.co_cellvars}
    saved = rewrite_saves(node.body)[1]
    lost = filled.filled(node.body, outer, saved) if named else ()  # what helpers fill, others of them may read
    return _Recompiled(result, names, kept_outside(node.body, outer, saved), lost, source)


def _outer_value(function: FunctionType, name: str) -> Any:
    """The value of a name that a function has from outside; KeyError or ValueError if it has none."""
    if name in function.__code__.co_freevars and function.__closure__ is not None:
        return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents
    return function.__globals__[name]


def _rewrite(node: _Function, rewriter: SaveRewriter) -> None:
    if isinstance(node, ast.Lambda):
        node.body = rewriter.visit(node.body)
    else:
        node.body = rewriter.rewrite_body(node.body)


def _nodes(tree: ast.Module, code: CodeType) -> Iterator[_Function]:
    return (node for node in ast.walk(tree) if isinstance(node, _Function) and _defines(node, code))


def _defines(node: _Function, code: CodeType) -> bool:
    if isinstance(node, ast.Lambda):
        if code.co_name != "<lambda>" or node.lineno != code.co_firstlineno:
            return False
        places = {(line, column, end, end_column) for line, end, column, end_column in code.co_positions()}
        return Span.of(node.body) in places
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return node.name == code.co_name and first == code.co_firstlineno


def _path(source: Source, code: CodeType, node: _Function) -> tuple[int, ...] | None:
    """Where the code is within the compiled file: at each level, the how-manieth code object to enter."""
    for path, other in _numbered(source.module, ()):
        if _defines(node, other) and agree(code, other, node, source.tree):
            return path
    return None


def _numbered(code: CodeType, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], CodeType]]:
    yield path, code
    for number, inner in enumerate(_inner(code)):
        yield from _numbered(inner, (*path, number))


def _follow(code: CodeType, path: tuple[int, ...]) -> CodeType:
    for number in path:
        code = _inner(code)[number]
    return code


def _inner(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _same_call(new: CodeType, old: CodeType) -> bool:
    return new.co_freevars == old.co_freevars and new.co_name == old.co_name and new.co_argcount == old.co_argcount
