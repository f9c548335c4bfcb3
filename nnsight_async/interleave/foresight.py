"""Whether a block speaks of `.source`, told from its code before it runs.

An operation can be reported only if the forward around it was entered in its reporting form, and that happens before
the block asks: while it waits for a module inside that forward, say.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType, ModuleType

NAME = "source"
FOREIGN = frozenset({"torch", "numpy", "nnsight_async", "transformers", "vllm", *sys.stdlib_module_names})
MOST_FUNCTIONS = 200


def speaks_of_source(program: object) -> bool:
    """Whether the code of `program`, or of a function that it names, has an attribute or a string `source`."""
    seen: set[CodeType] = set()
    waiting = list(_functions(program))
    while waiting and len(seen) < MOST_FUNCTIONS:
        function = waiting.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        if _says(function.__code__):
            return True
        waiting += _named(function)
    return False


@functools.lru_cache(maxsize=512)
def _says(code: CodeType) -> bool:
    return NAME in code.co_names or NAME in code.co_consts or any(map(_says, _inner(code)))


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
