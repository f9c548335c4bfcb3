"""Modules that a block applies, on all ranks of a tensor-parallel group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch

from nnsight_async.errors import NNsightError, UnsupportedError
from nnsight_async.interleave.layouts import Layouts, mapped
from nnsight_async.interleave.locations import Location, expression
from nnsight_async.interleave.ranks import Apply, Kind, Ranks, gathered

PLAIN = (bool, int, float, complex, str, bytes, slice, torch.dtype, torch.device, torch.Size, type(None))


class _Tensor(NamedTuple):
    number: int


class _Module(NamedTuple):
    path: str


def announced(path: str, method: str, arguments: tuple[Any, ...], refer: Callable[[Any], str | None]) -> Any:
    """An `Apply`, and its tensors. `UnsupportedError` for arguments that cannot be given to the other ranks."""
    tensors: list[torch.Tensor] = []

    def packed(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value.detach())
            return _Tensor(len(tensors) - 1)
        if (module := refer(value)) is not None:
            return _Module(module)
        if isinstance(value, (tuple, list)):
            return type(value)(map(packed, cast("list[Any]", value)))  # pyright: ignore[reportUnknownVariableType]
        if isinstance(value, dict):
            return {key: packed(item) for key, item in cast("dict[Any, Any]", value).items()}
        if isinstance(value, PLAIN):
            return value
        raise UnsupportedError(
            f"{expression(path)} is applied on every rank of this tensor-parallel engine, and a "
            f"{type(value).__qualname__} cannot be given to it: only tensors, numbers, strings and modules can be"
        )

    arguments = packed(arguments)
    return Apply(path, method, arguments, [Kind.of(tensor) for tensor in tensors]), tensors


def unpacked(value: Any, tensors: list[torch.Tensor], module: Callable[[str], Any]) -> Any:
    """The arguments of an `Apply`."""
    match value:
        case _Tensor():
            return tensors[value.number]
        case _Module():
            return module(value.path)
        case tuple() | list():
            items = [unpacked(item, tensors, module) for item in cast("list[Any]", value)]
            return items if isinstance(value, list) else tuple(items)
        case dict():
            return {key: unpacked(item, tensors, module) for key, item in cast("dict[Any, Any]", value).items()}
        case _:
            return value


def apply(module: torch.nn.Module, asked: Apply, arguments: tuple[Any, ...], layouts: Layouts, ranks: Ranks) -> Any:
    """Have this rank do its part of applying `module` to whole arguments; returns the whole output on the first rank.

    Raises what the module did on this rank, and `NNsightError` where it failed on another one.
    """
    called = asked.method == "forward"
    place = layouts.of_call(asked.path, _names(module)) if called else {}
    args, kwargs = mapped(arguments, place, lambda tensor, layout: layout.part(tensor, ranks.rank, ranks.size))
    error: BaseException | None = None
    output: Any = None
    try:
        output = module(*args, **kwargs) if called else getattr(module, asked.method)(*args, **kwargs)
    except BaseException as raised:
        error = raised
    failures = ranks.agree(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise NNsightError(f"{expression(asked.path)} could not be applied on rank {rank}: {failure}")
    return gathered(output, layouts.at(Location(asked.path, "output")), ranks) if called else output


def check(layouts: Layouts, path: str) -> None:
    """Raise `UnsupportedError` where the arguments or the output of a module cannot be made whole."""
    for kind in ("inputs", "output"):
        refuse(layouts, Location(path, kind))


def refuse(layouts: Layouts, event: Location) -> None:
    """Raise `UnsupportedError` where the value at `event` cannot be made whole."""
    if not layouts.known(event):
        why = "only of operations that call a module it is" if event.operation else "no rule is"
        raise UnsupportedError(
            f"{event} may differ from rank to rank of this tensor-parallel engine, and how the parts belong together "
            f"is not known ({why} known); read what the modules around it take and return, or build the model without "
            "tensor_parallel_size"
        )


def _names(module: torch.nn.Module) -> list[str]:
    parameters: Mapping[str, Any] = inspect.signature(type(module).forward).parameters
    return list(parameters)[1:]
