"""What a block will do, told from its code before it runs.

An operation can be reported only if the forward around it was entered in its reporting form, and that happens before
the block asks: while it waits for a module inside that forward, say. And what is saved has to be copied at once only
where something may be changed after it.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeVar, cast

import torch

T = TypeVar("T")

NAME = "source"
OURS = "nnsight_async"
FOREIGN = frozenset({"torch", "numpy", OURS, "transformers", "vllm", *sys.stdlib_module_names})
MOST_VALUES = 300
MOST_CODES = 512
STORES = frozenset({"STORE_SUBSCR", "STORE_SLICE", "DELETE_SUBSCR"})
KEYWORDS = frozenset({"out", "inplace"})
WITH = frozenset({"BEFORE_WITH", "BEFORE_ASYNC_WITH", "LOAD_SPECIAL"})
ENTERING = frozenset({"__enter__", "enter_context"})
GRADIENTS = frozenset({"autograd", "backward", "grad", "jacrev", "requires_grad", "requires_grad_", "vjp"})
PLAIN = (torch.Tensor, str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.Size)
CONTAINERS = (list, tuple, set, frozenset)
OPAQUE = object()
"""In place of what cannot be looked into, or is too much."""
OPERATORS = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
MEMORY = ("numpy", "asarray", "__array__", "data_ptr", "untyped_storage", "dlpack", "from_dlpack")
GIVE_OUT = frozenset({"data", "storage", "frombuffer", "__dlpack__", *MEMORY})
WRITERS = frozenset({"setitem", "ops", *MEMORY, *(f"i{name}" for name in OPERATORS)})
"""Names of functions that write, or that give out the memory: `operator.iadd`, `torch.ops`, NumPy's views."""


class Foresight(NamedTuple):
    """What is told of a block, and of what it names.

    `source`: it has an attribute or a string `source`. `changes`: it may change a tensor in place (a subscript that is
    assigned, `+=` and the like, a method whose name ends in `_`, `out=`, a module that works in place), or uses too
    much to tell. `gradients`: it names what takes them (`backward`, `grad`, `torch.autograd`). `memory`: it names what
    gives out the memory of a tensor, where changes are not counted (`.data`, NumPy's views, DLPack). `modes`: it has a
    `with`, or a name that begins with `set_`, and so may leave a mode of torch switched.
    """

    source: bool = False
    changes: bool = False
    gradients: bool = False
    memory: bool = False
    modes: bool = False


def foresee(program: object) -> Foresight:
    """What the code of `program` says, and that of all that it can come to by names, attributes and containers."""
    seen: dict[int, object] = {}
    waiting = [program]
    source = changes = gradients = memory = modes = False
    while waiting and not (source and changes and gradients and memory and modes):
        value = waiting.pop()
        if isinstance(value, PLAIN) or id(value) in seen:
            continue
        if len(seen) == MOST_VALUES:
            return Foresight(source, changes=True, gradients=gradients, memory=True, modes=True)
        seen[id(value)] = value
        if isinstance(value, FunctionType) and not _is_foreign(value):
            told = _told(value.__code__)
            source, changes = source or told.source, changes or told.changes
            gradients, memory = gradients or told.gradients, memory or told.memory
            modes = modes or told.modes
        elif value is OPAQUE:
            changes = modes = True
        elif _is_writer(value):
            changes = True
        elif hasattr(type(value), "__exit__"):
            modes = True
        waiting += _within(value)
    return Foresight(source, changes, gradients, memory, modes)


def _remembered(tell: Callable[[CodeType], T]) -> Callable[[CodeType], T]:
    """`tell`, once for each code object: hashing one takes as long as looking into it."""
    known: dict[int, tuple[CodeType, T]] = {}

    def remembered(code: CodeType) -> T:
        found = known.get(id(code))
        if found is None:
            if len(known) == MOST_CODES:
                known.clear()
            found = known[id(code)] = code, tell(code)
        return found[1]

    return remembered


@_remembered
def _told(code: CodeType) -> Foresight:
    inner = [_told(each) for each in _inner(code)]
    return Foresight(
        NAME in code.co_names or NAME in code.co_consts or any(each.source for each in inner),
        _changes(code) or any(each.changes for each in inner),
        _takes_gradients(code) or any(each.gradients for each in inner),
        not GIVE_OUT.isdisjoint(code.co_names) or any(each.memory for each in inner),
        _switches(code) or any(each.modes for each in inner),
    )


def _changes(code: CodeType) -> bool:
    if any(_writes(name) for name in code.co_names) or not KEYWORDS.isdisjoint(code.co_names):
        return True
    if any(constant is True for constant in code.co_consts) and not _in_place().isdisjoint(code.co_names):
        return True
    if any(not KEYWORDS.isdisjoint(names if isinstance(names, tuple) else (names,)) for names in code.co_consts):
        return True
    return any(
        found.opname in STORES
        or (found.opname == "BINARY_OP" and found.argrepr.endswith("="))
        or (found.opname == "STORE_ATTR" and found.argval == "data")
        for found in dis.get_instructions(code)
    )


def _switches(code: CodeType) -> bool:
    if any(name in ENTERING or name.lstrip("_").startswith("set_") for name in code.co_names):
        return True
    return any(found.opname in WITH for found in dis.get_instructions(code))


def _takes_gradients(code: CodeType) -> bool:
    return not GRADIENTS.isdisjoint(code.co_names) or any(
        constant in GRADIENTS for constant in code.co_consts if isinstance(constant, str)
    )


def _writes(name: str) -> bool:
    """Whether what has this name may change a tensor that it is given."""
    if name.startswith("__"):
        return name.strip("_") in WRITERS or name in WRITERS
    return name in WRITERS or (name.endswith("_") and not name.startswith("_"))


@functools.cache
def _in_place() -> frozenset[str]:
    """Functions and modules of PyTorch that work in place if an argument says so, which need not be named there."""
    found: dict[str, Any] = {**vars(torch.nn.functional), **vars(torch.nn)}
    return frozenset(name for name, value in found.items() if callable(value) and "inplace" in _parameters(value))


def _parameters(value: Any) -> Iterable[str]:
    try:
        return inspect.signature(value).parameters
    except (TypeError, ValueError):
        return ()


def _is_writer(value: object) -> bool:
    """Whether something that has no text may change a tensor that it is given."""
    if isinstance(value, (FunctionType, BuiltinFunctionType, MethodDescriptorType)):
        return _writes(value.__name__) or _package(value) == "vllm"
    if isinstance(value, dict):  # of keyword arguments
        return not KEYWORDS.isdisjoint(cast("dict[Any, Any]", value))
    return not isinstance(value, type) and bool(getattr(value, "__dict__", {}).get("inplace"))


@_remembered
def _names(code: CodeType) -> frozenset[str]:
    return frozenset(code.co_names).union(*map(_names, _inner(code)))


def _inner(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _within(value: object) -> Iterable[object]:
    """What can be come to from `value`."""
    match value:
        case FunctionType():
            return () if _is_foreign(value) else _named(value)
        case MethodType():
            return value.__func__, value.__self__
        case functools.partial():
            return value.func, value.args, value.keywords
        case type():
            return () if _is_foreign(value) else _members(value)
        case dict():
            return cast("dict[Any, Any]", value).values() if len(value) < MOST_VALUES else [OPAQUE]
        case list() | tuple() | set() | frozenset():
            return cast("Iterable[object]", value) if len(value) < MOST_VALUES else [OPAQUE]
        case ModuleType():
            return ()
        case _:
            return () if _package(type(value)) == OURS else (type(value), *_held(value))


def _named(function: FunctionType) -> Iterator[object]:
    """What `function` names: a global, an attribute of a module, a cell, a default."""
    names = _names(function.__code__)
    yield function.__defaults__ or ()
    yield function.__kwdefaults__ or ()
    values = [function.__globals__[name] for name in names if name in function.__globals__]
    values += [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
    modules: set[str] = set()
    while values:
        value = values.pop()
        if not isinstance(value, ModuleType):
            yield value
        elif value.__name__.partition(".")[0] == "vllm":
            yield OPAQUE
        elif value.__name__.partition(".")[0] not in FOREIGN and value.__name__ not in modules:
            modules.add(value.__name__)
            values += [vars(value)[name] for name in names & vars(value).keys()]


def _members(cls: type) -> Iterator[object]:
    """What stands in a class, and in those of its bases that are users'."""
    for base in cls.__mro__:
        if not _is_foreign(base):
            for name, member in vars(base).items():
                if isinstance(member, property):
                    yield from (member.fget, member.fset)
                elif not isinstance(member, type) and name not in ("__dict__", "__weakref__"):
                    yield getattr(member, "__func__", member)


def _held(value: object) -> Iterable[object]:
    """The attributes of an object that hold anything."""
    held: dict[str, object] | None = getattr(value, "__dict__", None)
    if held is None:
        return () if _is_foreign(type(value)) else [OPAQUE]
    return [item for item in held.values() if not (isinstance(item, (dict, *CONTAINERS)) and not item)]


def _package(value: Any) -> str:
    return (getattr(value, "__module__", None) or "").partition(".")[0]


def _is_foreign(value: FunctionType | type) -> bool:
    return _package(value) in FOREIGN


def _filled(cell: object) -> bool:
    try:
        return hasattr(cell, "cell_contents")
    except ValueError:
        return False
