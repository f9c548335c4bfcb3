"""Blocks of Python as text, which any version of Python reads; a pickle holds no more than what has no other form."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple, cast

import msgspec
import torch

from nnsight_async.capture import constants
from nnsight_async.capture.constants import Constant
from nnsight_async.capture.load import VERSION, imported
from nnsight_async.capture.ship import Pickled, Unshippable, dumps_through
from nnsight_async.capture.text import Text
from nnsight_async.capture.userland import is_user_module
from nnsight_async.errors import CaptureError
from nnsight_async.serve import messages as m
from nnsight_async.serve import wire

LONGEST, MOST, DEEPEST, BITS = 1 << 20, 10_000, 20, 8000
"""Of one text, list and integer, and of lists in one another: beyond that a pickle takes less time."""
VALUES, BYTES = 100_000, 4 << 20
"""Of all that is around a text, which servers bound (`policy.py`); the tensors are apart."""


class _Unsafe(Exception):  # noqa: N818 -- never leaves this file
    """A value that only a pickle can hold."""


class Sent(NamedTuple):
    """A block as its text, the tensors of its values, and a pickle of those that have no other form."""

    source: m.Source
    tensors: tuple[torch.Tensor, ...]
    payload: bytes
    constants: tuple[Constant, ...]


def source_of(text: Text, owners: Collection[object]) -> Sent | None:
    """A block as its text and the values around it; None where all of it has to be one pickle.

    Tensors are copied: they are sent as they are now.
    """
    written = text.written()
    if written is None:
        return None
    around = _Around(text, owners)
    for name in (*written.free, *written.entries):
        try:
            value = text.seen(name)
        except (KeyError, ValueError):
            continue  # of the builtins, or without a value
        around.add(name, value)
    try:
        pickled = around.pickled()
    except (Unshippable, CaptureError):
        return None
    if pickled is None:
        return None
    source = m.Source(
        text=written.text,
        filename=text.filename,
        first_line=written.first_line,
        lines=written.lines,
        parameters=list(written.parameters),
        free=around.values(written.free),
        entries=around.values(written.entries),
        constants=[constant.digest for constant in pickled.constants],
        function=text.function,
        qualname=written.qualname,
        class_name=written.class_name,
        annotations=written.annotations,
        module=written.module,
    )
    tensors = tuple(tensor.detach().cpu().clone() for tensor in around.tensors)
    return Sent(source, tensors, pickled.payload, pickled.constants)


class _Around:
    """The values around a text: by name, as they are, and what is left."""

    def __init__(self, text: Text, owners: Collection[object]) -> None:
        self._text = text
        self._owners = owners
        self._named: dict[str, m.Outer] = {}
        self._plain: dict[str, tuple[Any, frozenset[int]]] = {}
        self._left: dict[str, Any] = {}
        self._values = self._bytes = 0
        self.tensors: list[torch.Tensor] = []

    def add(self, name: str, value: Any) -> None:
        try:
            named = self._by_name(value)
            if named is None:
                self._plain[name] = value, self._parts(value)
            else:
                self._named[name] = named
        except _Unsafe:
            self._left[name] = value

    def pickled(self) -> Pickled | None:
        """What is left, with those of the others that hold the same objects: they are to be the same ones there too.

        None if code in it and the text bind one another's variables. Raises `Unshippable` and `CaptureError`.
        """
        while self._left:
            pickled, through = self._dumped()
            if not self._left:
                break
            if self._text.rebound(through.values()):
                return None
            shared = [name for name, (_, parts) in self._plain.items() if not parts.isdisjoint(through)]
            if not shared:
                return pickled._replace(payload=VERSION + pickled.payload)
            self._left |= {name: self._plain.pop(name)[0] for name in shared}
        return Pickled(b"", ())

    def values(self, names: Iterable[str]) -> dict[str, m.Outer]:
        found: dict[str, m.Outer] = {}
        for name in names:
            if name in self._named:
                found[name] = self._named[name]
            elif name in self._plain:
                packed = wire.pack(self._plain[name][0], self.tensors)
                found[name] = m.Value(msgspec.Raw(msgspec.msgpack.encode(packed)))
            elif name in self._left:
                found[name] = m.Pickled()
        return found

    def _dumped(self) -> tuple[Pickled, dict[int, object]]:
        try:
            return dumps_through(self._left, self._text.attributes, self._owners)
        except Unshippable:
            stale = [name for name in self._left if name in self._text.optional and not self._travels(name)]
            self._left = {name: value for name, value in self._left.items() if name not in stale}
            return dumps_through(self._left, self._text.attributes, self._owners)

    def _travels(self, name: str) -> bool:
        try:
            dumps_through(self._left[name], self._text.attributes, self._owners)
        except Unshippable:
            return False
        return True

    def _by_name(self, value: Any) -> m.Outer | None:
        if hasattr(type(value), "__block_reference__"):
            owner = getattr(value, "__block_owner__", None)
            if owner is not None and not any(owner is known for known in self._owners):
                raise _Unsafe
            return m.Module(list(value.__block_reference__()))
        if isinstance(value, (ModuleType, FunctionType, BuiltinFunctionType, type)):
            return _import(value)
        return m.Import("torch", str(value).removeprefix("torch.")) if isinstance(value, torch.dtype) else None

    def _parts(self, value: Any) -> frozenset[int]:
        looked = _Looked()
        looked.through(value)
        values, size = self._values + looked.values, self._bytes + looked.bytes
        if values > VALUES or size > BYTES or any(not looked.parts.isdisjoint(of) for _, of in self._plain.values()):
            raise _Unsafe
        self._values, self._bytes = values, size
        return frozenset(looked.parts)


class _Looked:
    """What a plain value is made of: how much, and which lists, dictionaries and tensors."""

    def __init__(self) -> None:
        self.values = self.bytes = 0
        self.parts: set[int] = set()

    def through(self, value: Any, depth: int = 0) -> None:
        """Raise `_Unsafe` for what would come as another value than it is, or as two where it is one."""
        kind = type(value)
        self.values += 1
        if kind in (list, tuple, dict):
            self._through_parts(value, kind, depth)
        elif kind is torch.Tensor:
            self._part(value)
            if not constants.is_plain(value) or value.dtype not in wire.NAMES:
                raise _Unsafe
            if value.requires_grad or not value.is_contiguous():
                raise _Unsafe
        elif kind in (str, bytes):
            self._text(value)
        elif kind is int:
            if value.bit_length() > BITS:
                raise _Unsafe
        elif value is not None and kind not in (bool, float):
            raise _Unsafe

    def _through_parts(self, whole: Any, kind: type, depth: int) -> None:
        if kind is not tuple:
            self._part(whole)
        parts = [*whole, *whole.values()] if kind is dict else list(cast("Iterable[Any]", whole))
        if len(parts) > MOST or depth > DEEPEST or self.values > VALUES:
            raise _Unsafe
        for part in parts:
            self.through(part, depth + 1)

    def _text(self, value: str | bytes) -> None:
        content = value.encode(errors="ignore") if isinstance(value, str) else value
        self.bytes += len(content)
        if len(content) > LONGEST or (isinstance(value, str) and content.decode() != value):
            raise _Unsafe  # halves of surrogate pairs are no text

    def _part(self, part: object) -> None:
        if id(part) in self.parts:
            raise _Unsafe
        self.parts.add(id(part))


def _import(value: Any) -> m.Import:
    """What the other side has under the same name; `_Unsafe` for what is the user's own."""
    module = value.__name__ if isinstance(value, ModuleType) else value.__module__
    path = "" if isinstance(value, ModuleType) else value.__qualname__
    if not isinstance(module, str) or module not in sys.modules or is_user_module(module):
        raise _Unsafe
    try:
        found = imported(module, path)
    except (ImportError, AttributeError):
        raise _Unsafe from None
    if found is not value:
        raise _Unsafe
    return m.Import(module, path)
