"""What a block will do, told from its code before it runs.

An operation can be reported only if the forward around it was entered in its reporting form, and that happens before
the block asks: while it waits for a module inside that forward, say. And what is saved has to be copied at once only
where something may be changed after it.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import NamedTuple

NAME = "source"
FOREIGN = frozenset({"torch", "numpy", "nnsight_async", "transformers", "vllm", *sys.stdlib_module_names})
MOST_FUNCTIONS = 200
STORES = frozenset({"STORE_SUBSCR", "STORE_SLICE", "DELETE_SUBSCR"})
KEYWORDS = frozenset({"out", "inplace"})


class Foresight(NamedTuple):
    """What is told of a block, and of the functions that it names.

    `source`: it has an attribute or a string `source`. `changes`: it may change a tensor in place (a subscript that is
    assigned, `+=` and the like, a method whose name ends in `_`, `out=`), or is too large to tell.
    """

    source: bool = False
    changes: bool = False


def foresee(program: object) -> Foresight:
    """What the code of `program`, and of the functions that it names, says."""
    seen: set[CodeType] = set()
    waiting = list(_functions(program))
    source = changes = False
    while waiting and not (source and changes):
        function = waiting.pop()
        if function.__code__ in seen:
            continue
        if len(seen) == MOST_FUNCTIONS:
            return Foresight(source, changes=True)
        seen.add(function.__code__)
        told = _told(function.__code__)
        source, changes = source or told.source, changes or told.changes
        waiting += _named(function)
    return Foresight(source, changes)


@functools.lru_cache(maxsize=512)
def _told(code: CodeType) -> Foresight:
    inner = [_told(each) for each in _inner(code)]
    return Foresight(
        NAME in code.co_names or NAME in code.co_consts or any(each.source for each in inner),
        _changes(code) or any(each.changes for each in inner),
    )


def _changes(code: CodeType) -> bool:
    if any(name == "__setitem__" or (name.endswith("_") and not name.startswith("_")) for name in code.co_names):
        return True
    if any(isinstance(names, tuple) and not KEYWORDS.isdisjoint(names) for names in code.co_consts):
        return True
    return any(
        found.opname in STORES
        or (found.opname == "BINARY_OP" and found.argrepr.endswith("="))
        or (found.opname == "STORE_ATTR" and found.argval == "data")
        for found in dis.get_instructions(code)
    )


@functools.lru_cache(maxsize=512)
def _names(code: CodeType) -> frozenset[str]:
    return frozenset(code.co_names).union(*map(_names, _inner(code)))


def _inner(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _named(function: FunctionType) -> Iterator[FunctionType]:
    """Functions that `function` may call: by a global name, by an attribute of a module, or from a cell."""
    names = _names(function.__code__)
    values = [function.__globals__[name] for name in names if name in function.__globals__]
    values += [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
    for value in values:
        if isinstance(value, ModuleType):
            for name in names & vars(value).keys():
                yield from _functions(vars(value)[name])
        else:
            yield from _functions(value)


def _functions(value: object) -> Iterator[FunctionType]:
    match value:
        case FunctionType():
            if _package(value) not in FOREIGN:
                yield value
        case MethodType():
            yield from _functions(value.__func__)
        case functools.partial():
            yield from _functions(value.func)
        case type():
            if _package(value) not in FOREIGN:
                yield from _methods(value)
        case _:
            yield from _functions(type(value))


def _methods(cls: type) -> Iterator[FunctionType]:
    """The functions in a class, and in those of its bases that are its author's."""
    for base in cls.__mro__:
        if _package(base) == _package(cls):
            for member in vars(base).values():
                member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
                if isinstance(member, FunctionType):
                    yield member


def _package(value: FunctionType | type) -> str:
    return (value.__module__ or "").partition(".")[0]


def _filled(cell: object) -> bool:
    try:
        return hasattr(cell, "cell_contents")
    except ValueError:
        return False
