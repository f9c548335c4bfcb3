from __future__ import annotations

import asyncio
import io
import marshal
import pickle
import sys
import threading
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle
import torch

from nnsight_async.capture.compile import attribute_names
from nnsight_async.capture.constants import LARGE, Constant, constant, content_of, is_plain, span
from nnsight_async.capture.load import ORIGIN, Geometry, large, load_code, reference, set_class_state, small
from nnsight_async.capture.recompile import recompiled
from nnsight_async.capture.userland import is_user_module
from nnsight_async.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Collection
    from collections.abc import Set as AbstractSet

_FILES = (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO)
_REFUSED = (*_FILES, asyncio.AbstractEventLoop)
_STREAMS = ("stdin", "stdout", "stderr")
_registry = threading.RLock()


class Unshippable(Exception):  # noqa: N818 -- becomes a ShippingError when the variable is known
    """`culprit` cannot be pickled."""

    def __init__(self, culprit: object) -> None:
        super().__init__()
        self.culprit = culprit


class Pickled(NamedTuple):
    """A value as bytes, and the large tensors that they name."""

    payload: bytes
    constants: tuple[Constant, ...]


def dumps(value: object, attributes: AbstractSet[str], owners: Collection[object] | None = None) -> Pickled:
    """Pickle `value`; functions and classes of the user's own modules go by value, with their saves rewritten.

    Of a module of the user's that is itself a value, only what is named in `attributes`, or in a function that goes
    too, is taken along. What goes by name must belong to one of the `owners`, if they are given. Raises `Unshippable`.
    """
    return _dumped(value, attributes, owners).pickled


def dumps_through(
    value: object, attributes: AbstractSet[str], owners: Collection[object] | None = None
) -> tuple[Pickled, dict[int, object]]:
    """The same, and by their ids all the objects that it has gone through."""
    pickler = _dumped(value, attributes, owners)
    return pickler.pickled, {key: found for key, (_, found) in pickler.memo.copy().items()}


def _dumped(value: object, attributes: AbstractSet[str], owners: Collection[object] | None) -> _BlockPickler:
    known = set(attributes)
    while True:
        pickler = _BlockPickler(known, owners)
        pickler.write(value)
        if not pickler.missed:
            return pickler


class _BlockPickler(cloudpickle.Pickler):
    def __init__(self, attributes: set[str], owners: Collection[object] | None) -> None:
        self._owners = owners
        self._buffer = io.BytesIO()
        super().__init__(self._buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.constants: dict[bytes, Constant] = {}
        self.missed = False  # whether a module went before all that is used of it was known
        self._attributes = attributes
        self._sent_module = False
        self._registered: dict[ModuleType, bool] = {}  # module: whether it was registered by us
        self._current: object = None

    @property
    def pickled(self) -> Pickled:
        return Pickled(self._buffer.getvalue(), tuple(self.constants.values()))

    def write(self, value: object) -> None:
        try:
            self.dump(value)
        except CaptureError:  # about a function that goes too
            raise
        except Exception as error:
            raise Unshippable(self._current) from error
        finally:
            self._unregister()

    def reducer_override(self, obj: Any) -> Any:
        self._current = obj
        # here and not by persistent_id, which Python calls for every number of a long list too
        if hasattr(type(obj), "__block_reference__"):
            self._check_owner(obj)
            return reference, tuple(obj.__block_reference__())
        if isinstance(obj, FunctionType):
            return NotImplemented if _is_imported(obj) else super().reducer_override(self._prepared(obj))
        if isinstance(obj, MethodType) and hasattr(type(obj.__self__), "__block_reference__"):
            return getattr, (obj.__self__, obj.__name__)  # the method of what the reference means there
        elif isinstance(obj, CodeType):
            return load_code, (marshal.dumps(obj),)
        elif isinstance(obj, type):
            self._register(obj.__module__)
            return _reduce_class(super().reducer_override(obj))
        elif isinstance(obj, ModuleType):
            if is_user_module(obj.__name__):
                return self._reduce_module(obj)
        elif isinstance(obj, torch.Tensor):
            return self._reduce_tensor(obj)
        elif isinstance(obj, _REFUSED):
            return _reduce_stream(obj)
        _check_allowed(obj)
        return super().reducer_override(obj)

    def _check_owner(self, obj: Any) -> None:
        owner = getattr(obj, "__block_owner__", None)
        if owner is not None and self._owners is not None and not any(owner is known for known in self._owners):
            raise TypeError("it belongs to another model or trace")

    def _prepared(self, function: FunctionType) -> FunctionType:
        module = function.__module__
        if module in sys.modules and not self._register(module):
            return function
        self._learn(attribute_names(function.__code__))
        return recompiled(function, named=False)[0]

    def _learn(self, names: AbstractSet[str]) -> None:
        if self._sent_module and not names <= self._attributes:
            self.missed = True
        self._attributes |= names

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if is_plain(tensor):
            flat = span(tensor)
            geometry = Geometry(tensor.dtype, tuple(tensor.size()), tensor.stride(), tensor.requires_grad)
            if flat.nbytes < LARGE:
                return small, (content_of(flat), *geometry)
            found = constant(flat)
            self.constants[found.digest] = found
            return large, (found.digest, *geometry)
        return super().reducer_override(tensor)

    def _reduce_module(self, module: ModuleType) -> tuple[object, ...]:
        self._sent_module = True
        state = {name: value for name, value in vars(module).items() if name in self._attributes}
        return ModuleType, (module.__name__,), state

    def _register(self, name: str) -> bool:
        """Whether `name` is a user's module; if so cloudpickle takes what it defines by value until this dump ends."""
        if name == "__main__":  # always taken by value
            return True
        if not is_user_module(name):
            return False
        module = sys.modules[name]
        if module not in self._registered:
            if not self._registered:
                _registry.acquire()
            self._registered[module] = name not in cloudpickle.list_registry_pickle_by_value()
            cloudpickle.register_pickle_by_value(module)
        return True

    def _unregister(self) -> None:
        for module, ours in self._registered.items():
            if ours:
                cloudpickle.unregister_pickle_by_value(module)
        if self._registered:
            _registry.release()


def _check_allowed(obj: object) -> None:
    refusal: str | None = getattr(type(obj), "__block_refusal__", None)
    if refusal is not None:
        raise TypeError(refusal)


def _is_imported(function: FunctionType) -> bool:
    """Whether a function is had by its name where its module is installed."""
    name = function.__module__
    module = sys.modules.get(name) if name != "__main__" else None
    return module is not None and vars(module).get(function.__qualname__) is function and not is_user_module(name)


def _reduce_class(reduced: Any) -> Any:
    if not isinstance(reduced, tuple) or len(reduced) != 6 or reduced[5] is None:
        return reduced
    state, fill = reduced[2], reduced[5]
    return (*reduced[:2], (ORIGIN, fill, state), *reduced[3:5], set_class_state)


def _reduce_stream(obj: object) -> tuple[object, ...]:
    for name in _STREAMS:
        if obj is getattr(sys, name):
            return getattr, (sys, name)
    raise pickle.PicklingError(f"cannot pickle {type(obj).__name__!r} object")
