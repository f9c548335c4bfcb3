"""Blocks of Python as text: without a pickle, and between any versions of Python."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, cast

import msgspec
import torch

from nnsight_async.capture import constants
from nnsight_async.capture.block import Block
from nnsight_async.capture.load import VERSION, Body, imported
from nnsight_async.capture.ship import dumps
from nnsight_async.capture.text import Text, Written
from nnsight_async.capture.userland import is_user_module
from nnsight_async.capture.written import code_of
from nnsight_async.errors import CaptureError
from nnsight_async.serve import messages as m
from nnsight_async.serve import wire

_SCALARS = (type(None), bool, int, float, str, bytes)
LONGEST, MOST, DEEPEST = 1 << 20, 10_000, 20
"""Of texts, and of lists and what is in one another: beyond that a pickle takes less time, and servers have bounds."""
_values: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()


class _Unsafe(Exception):  # noqa: N818 -- never leaves this file
    """A value that only a pickle can hold."""


# -- where the block is written ----------------------------------------------------------------------------------------


def source_of(text: Text, owners: Collection[object]) -> tuple[m.Source, list[torch.Tensor]] | None:
    """A block as its text and its buffers; None where it uses what has no safe form: a function of the user's, a class.

    Tensors are copied: they are sent as they are now.
    """
    written = text.written()
    if written is None:
        return None
    around = _Around(owners)
    try:
        free, entries = (around.values(names, text.seen) for names in (written.free, written.entries))
    except _Unsafe:
        return None
    source = m.Source(
        text=written.text,
        filename=text.filename,
        first_line=written.first_line,
        lines=written.lines,
        parameters=list(written.parameters),
        free=free,
        entries=entries,
        function=text.function,
        qualname=written.qualname,
        class_name=written.class_name,
        annotations=written.annotations,
        module=written.module,
    )
    return source, [tensor.detach().cpu().clone() for tensor in around.tensors]


class _Around:
    """The values around a text, as they travel."""

    def __init__(self, owners: Collection[object]) -> None:
        self._owners = owners
        self.tensors: list[torch.Tensor] = []
        self._seen: dict[int, object] = {}

    def values(self, names: Iterable[str], seen: Callable[[str], Any]) -> dict[str, m.Outer]:
        found: dict[str, m.Outer] = {}
        for name in names:
            try:
                value = seen(name)
            except (KeyError, ValueError):
                continue  # of the builtins, or without a value
            found[name] = self._outer(value)
        return found

    def _outer(self, value: Any) -> m.Outer:
        if hasattr(type(value), "__block_reference__"):
            owner = getattr(value, "__block_owner__", None)
            if owner is not None and not any(owner is known for known in self._owners):
                raise _Unsafe
            return m.Module(list(value.__block_reference__()))
        if isinstance(value, (ModuleType, FunctionType, BuiltinFunctionType, type)):
            return _import(value)
        if isinstance(value, torch.dtype):
            return m.Import("torch", str(value).removeprefix("torch."))
        self._check(value)
        return m.Value(msgspec.Raw(msgspec.msgpack.encode(wire.pack(value, self.tensors))))

    def _check(self, value: Any, depth: int = 0) -> None:
        """Raise `_Unsafe` for what would come as another value than it is, or as two where it is one."""
        kind = type(value)
        if kind in _SCALARS:
            if kind in (str, bytes) and (len(value) > LONGEST or (kind is str and not _is_text(value))):
                raise _Unsafe
            return
        if id(value) in self._seen or depth > DEEPEST or len(self._seen) > MOST:
            raise _Unsafe
        self._seen[id(value)] = value
        if kind is torch.Tensor:
            if not constants.is_plain(value) or value.requires_grad or not value.is_contiguous():
                raise _Unsafe
        elif kind in (list, tuple, dict):
            parts = [*cast("dict[Any, Any]", value), *value.values()] if kind is dict else cast("list[Any]", value)
            if len(parts) > MOST:
                raise _Unsafe
            for part in parts:
                self._check(part, depth + 1)
        else:
            raise _Unsafe


def _is_text(value: str) -> bool:
    return value.encode(errors="ignore").decode() == value  # halves of surrogate pairs are none


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


# -- where it runs -----------------------------------------------------------------------------------------------------


class _Reference:
    """In the worker: a module, the model or the tracer."""

    def __init__(self, reference: list[str]) -> None:
        self._reference = reference

    def __block_reference__(self) -> tuple[str, ...]:
        return tuple(self._reference)


class _Imported:
    """In the worker: what is imported there, and not in the server's process."""

    def __init__(self, module: str, path: str) -> None:
        self._name = (module, path)

    def __reduce__(self) -> Any:
        return imported, self._name


def block_of(code: m.Source, buffers: wire.Buffers, names: list[str], place: str) -> Block:
    """The block of a text. It is compiled here and run in the worker; `ValueError` for what is none."""
    free, entries = _opened(code.free, buffers), _opened(code.entries, buffers)
    buffers.finish()
    written = Written(
        text=code.text,
        first_line=code.first_line,
        lines=code.lines,
        parameters=tuple(code.parameters),
        free=tuple(free),
        entries=tuple(entries),
        qualname=code.qualname,
        class_name=code.class_name,
        annotations=code.annotations,
        module=code.module,
    )
    if not all(name.isidentifier() for name in (*written.parameters, *entries, code.class_name or "x")):
        raise ValueError("a block of Python whose names are none")
    try:
        made = code_of(written, tuple(entries), code.filename, code.function)
    except (SyntaxError, CaptureError, RecursionError, MemoryError, UnicodeError) as error:
        raise ValueError(f"a block of Python that cannot be compiled: {error}") from None
    namespace = {"__name__": code.module, "__package__": code.module.rpartition(".")[0], **free}
    pickled = dumps(tuple(Body(made, namespace, tuple(entries.values()))), frozenset())
    return Block(VERSION + pickled.payload, tuple(names), place, 0, "block", pickled.constants)


def _opened(values: Mapping[str, m.Outer], buffers: wire.Buffers) -> dict[str, Any]:
    return {name: _value(value, buffers) for name, value in values.items()}


def _value(value: m.Outer, buffers: wire.Buffers) -> Any:
    match value:
        case m.Module():
            return _Reference(value.reference)
        case m.Import():
            return _Imported(value.module, value.path)
        case m.Value():
            return buffers.unpack(buffers.open(value.value, _values))
