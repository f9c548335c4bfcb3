from __future__ import annotations

import builtins
import functools
import importlib
import io
import marshal
import pickle
import secrets
import sys
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch

from nnsight_async.capture.plain import PLAIN
from nnsight_async.errors import ShippingError

Resolve = Callable[[tuple[str, ...]], object]
Constants = Callable[[bytes], torch.Tensor]
Program = Callable[[object, object], object]

VERSION = bytes(sys.version_info[:2])
"""The head of every payload: code objects are those of one minor version of Python."""


class Body(NamedTuple):
    """The body of a `with`, as it travels: code, the names of its globals, and the values its parameters start from."""

    code: bytes
    namespace: dict[str, Any]
    entries: tuple[Any, ...]
    plain: tuple[Any, ...] | None = None
    """The body as data, where it is of few forms (`capture/plain.py`)."""

    def program(self) -> Program:
        """A function of (model, tracer); each call starts from the same values."""
        code = load_code(self.code)
        function = FunctionType(code, {**self.namespace, "__builtins__": builtins}, code.co_name, self.entries)
        if self.plain is not None:
            setattr(function, PLAIN, self.plain)
        return function


@functools.lru_cache(maxsize=256)
def load_code(marshalled: bytes) -> CodeType:
    """A code object as it was, file name included (cloudpickle's own form leaves that out)."""
    return marshal.loads(marshalled)


ORIGIN = secrets.token_bytes(8)
"""This process, to be told from others."""


def set_class_state(kind: type, state: tuple[bytes, Callable[[type, Any], object], Any]) -> None:
    """Fill a class that came by value; in the process it is from it is the user's own class, and stays as it is."""
    origin, fill, content = state
    if origin != ORIGIN:
        fill(kind, content)


def reference(*name: str) -> object:
    """Stands in a payload for an object that travels by name; `load` puts `resolve` in its place."""
    raise ShippingError(f"{name} has a meaning only inside `load`")


class Geometry(NamedTuple):
    """How a tensor shows the bytes of its storage."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool

    def show(self, content: torch.Tensor) -> torch.Tensor:
        shown = content.view(self.dtype).as_strided(self.size, self.stride)
        return shown.requires_grad_() if self.requires_grad else shown


def small(content: bytes, *geometry: Any) -> torch.Tensor:
    """A tensor that travels inside its block. (PyTorch's own way fails to load float8 and uint16, as of 2.13.)"""
    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    return Geometry(*geometry).show(flat)


def imported(module: str, path: str) -> object:
    """Something of a module that is installed here."""
    found: object = importlib.import_module(module)
    for name in path.split(".") if path else ():
        found = getattr(found, name)
    return found


def large(digest: bytes, *geometry: Any) -> torch.Tensor:
    """Stands in a payload for a tensor that travels apart; `load` puts the tensor in its place."""
    raise ShippingError(f"{digest.hex()} has a meaning only inside `load`")


def part(payload: bytes, name: str) -> object:
    """Stands in a payload for one of the values in another, which is opened where this one is."""
    raise ShippingError(f"{name!r} has a meaning only inside `load`")


_REFERENCE = (reference.__module__, reference.__qualname__)
_LARGE = (large.__module__, large.__qualname__)
_PART = (part.__module__, part.__qualname__)

TENSORS = (("torch._utils", "_rebuild_tensor_v2"), (small.__module__, small.__qualname__))
"""What a pickled tensor is rebuilt by: ours, and PyTorch's (2.11, 2.13) for those that are more than their bytes."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, payload: bytes, resolve: Resolve, device: Any, constants: Constants | None) -> None:
        super().__init__(io.BytesIO(payload))
        self._resolve = resolve
        self._device = device
        self._constants = constants
        self._parts: Any = None

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == _REFERENCE:
            return self._resolved
        if (module_name, global_name) == _PART:
            return self._part
        if (module_name, global_name) == _LARGE and self._constants is not None:
            return functools.partial(_apart, self._constants)
        found = super().find_class(module_name, global_name)
        if self._device is not None and (module_name, global_name) in TENSORS:
            return functools.partial(_on_device, self._device, found)
        return found

    def _resolved(self, *name: str) -> object:
        return self._resolve(name)

    def _part(self, payload: bytes, name: str) -> object:
        parts = self._parts
        if parts is None:
            parts = self._parts = _opened(payload, self._resolve, self._device, self._constants)
        return parts[name]


def _on_device(device: Any, rebuild: Callable[..., Any], *parts: Any) -> Any:
    tensor = rebuild(*parts)
    return tensor.detach().to(device).requires_grad_(tensor.requires_grad)


def _apart(constants: Constants, digest: bytes, *geometry: Any) -> torch.Tensor:
    return Geometry(*geometry).show(constants(digest))


def load(payload: bytes, resolve: Resolve, device: Any = None, constants: Constants | None = None) -> Program:
    """The block as a function of (model, tracer); `resolve` turns references into what they mean here.

    Tensors that the block uses arrive on `device`, where the model's are (None: where they were). Those that travelled
    apart come from `constants`, flat and as bytes.

    Raises `ShippingError` if the block was made by another minor version of Python.
    """
    value = _opened(payload, resolve, device, constants)
    return Body(*value).program() if type(value) is tuple else value


def _opened(payload: bytes, resolve: Resolve, device: Any, constants: Constants | None) -> Any:
    head = len(VERSION)
    if payload[:head] != VERSION:
        theirs, ours = (".".join(map(str, version)) for version in (payload[:head], VERSION))
        raise ShippingError(
            f"the block was made by Python {theirs} and this worker runs Python {ours}: code travels only between "
            f"equal minor versions. Run the client with Python {ours}."
        )
    return _Unpickler(payload[head:], resolve, device, constants).load()
