"""What belongs to the real modules and so to every request: to be read by a block, not changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch

from nnsight_async.errors import IsolationError, UnsupportedError
from nnsight_async.interleave.locations import expression

READING = frozenset({"parameters", "named_parameters", "buffers", "named_buffers", "state_dict"})
"""Methods of a module that give its tensors."""

CHANGING = frozenset({
    "add_module", "apply", "bfloat16", "compile", "cpu", "cuda", "double", "eval", "float", "half", "load_state_dict",
    "register_buffer", "register_parameter", "requires_grad_", "set_submodule", "to", "to_empty", "train", "type",
    "zero_grad",
})  # fmt: skip
"""Methods of a module that change it."""


class SharedTensor(torch.Tensor):
    """A weight or buffer of the running model. What is computed from it is an ordinary tensor; it cannot be changed.

    Views of it cannot either.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if _changed(func, args, kwargs):
            raise IsolationError(
                f"{func.__name__} would change a weight of the model, which all requests share; change a copy "
                "(`weight.clone()`), or write what the module returns: `module.output = ...`"
            )
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            result = func(*args, **kwargs)
            storages = {arg.untyped_storage().data_ptr() for arg in _flat(args) if isinstance(arg, cls)}
            return _guarded(result, storages)


def guarded(value: Any, name: str, where: str) -> Any:
    """An attribute of a real module as a block may have it; `IsolationError` for what it may not have."""
    if name == "kv_cache":
        raise IsolationError(
            f"{where}.kv_cache holds keys and values of all requests; a block can read its own as they are computed: "
            "`.heads[i].k` and `.v` of the attention module"
        )
    if isinstance(value, torch.Tensor):
        return value.detach().as_subclass(SharedTensor)
    if name in CHANGING and callable(value):
        raise IsolationError(
            f"{where}.{name}() would change a module that all requests share; write what it returns for this run: "
            f"`{where}.output = ...`"
        )
    if name in READING and callable(value):
        return _reading(value)
    return value


def applicable(module: torch.nn.Module, path: str) -> torch.nn.Module:
    """A module that a block may apply; `UnsupportedError` for another."""
    if any(hasattr(part, "kv_cache") for part in module.modules()):
        raise UnsupportedError(
            f"{expression(path)} holds an attention layer, which writes the key-value cache of the requests in "
            "this step; only modules without attention can be applied inside a block"
        )
    return module


def reference(value: Any) -> str | None:
    """The path of a module of the tree; None for anything else."""
    refer = getattr(type(value), "__block_reference__", None)
    match refer(value) if refer is not None else None:
        case ("module", path):
            return path
        case _:
            return None


def _reading(method: Callable[..., Any]) -> Callable[..., Any]:
    def read(*args: Any, **kwargs: Any) -> Any:
        found = method(*args, **kwargs)
        if isinstance(found, dict):
            return {name: guarded(value, "", "") for name, value in cast("dict[str, Any]", found).items()}
        return map(_item, cast("Iterator[Any]", found))

    return read


def _item(item: Any) -> Any:
    return (item[0], guarded(item[1], "", "")) if isinstance(item, tuple) else guarded(item, "", "")


def _changed(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the call would change a shared tensor: by PyTorch's names, the first argument, or `out`."""
    name = func.__name__
    if any(isinstance(out, SharedTensor) for out in _flat(kwargs.get("out"))):
        return True
    changes = (
        name in ("__setitem__", "__set__")
        or (name.endswith("_") and not name.startswith("__"))
        or (name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__", "__int__"))
        or kwargs.get("inplace") is True
    )
    return changes and bool(args) and any(isinstance(arg, SharedTensor) for arg in _flat(args[0]))


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in cast("Sequence[Any]", value):
            yield from _flat(item)
    else:
        yield value


def _guarded(result: Any, storages: set[int]) -> Any:
    """Views among the results are shared too."""
    if isinstance(result, torch.Tensor):
        own = result.layout == torch.strided and result.untyped_storage().data_ptr() in storages
        return result.as_subclass(SharedTensor) if own else result
    if isinstance(result, np.ndarray):
        result.flags.writeable = False
    if isinstance(result, (tuple, list)) and not hasattr(cast("Any", result), "_fields"):
        return type(result)(_guarded(item, storages) for item in cast("Sequence[Any]", result))  # pyright: ignore
    return result
