"""Blocks of Python where they arrive: made ready for the worker, and neither run nor unpickled here."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from nnsight_async.capture.block import Block
from nnsight_async.capture.constants import Constant
from nnsight_async.capture.load import VERSION, Body, imported, part
from nnsight_async.capture.plain import Form, plain
from nnsight_async.capture.ship import dumps
from nnsight_async.capture.text import Written
from nnsight_async.capture.written import code_of, parsed
from nnsight_async.errors import CaptureError
from nnsight_async.serve import messages as m
from nnsight_async.serve import wire

_values: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()


class _Reference:
    """In the worker: a module, the model or the tracer."""

    def __init__(self, reference: list[str]) -> None:
        self._reference = reference

    def __block_reference__(self) -> tuple[str, ...]:
        return tuple(self._reference)


class _Imported:
    """In the worker: what is imported there."""

    def __init__(self, module: str, path: str) -> None:
        self._name = (module, path)

    def __reduce__(self) -> Any:
        return imported, self._name


class _Pickled:
    """In the worker: what a pickle has under a name."""

    def __init__(self, payload: bytes, name: str) -> None:
        self._place = (payload, name)

    def __reduce__(self) -> Any:
        return part, self._place


def block_of(code: m.Python | m.Source, buffers: wire.Buffers, names: list[str], place: str) -> Block:
    """The block of a request; `ValueError` for a text that is none."""
    if isinstance(code, m.Source):
        payload, constants = _of_text(code, buffers)
    else:
        payload, constants = _of_pickle(code.constants, buffers)
    buffers.finish()
    return Block(payload, tuple(names), place, 0, "block", constants)


def _of_text(code: m.Source, buffers: wire.Buffers) -> tuple[bytes, tuple[Constant, ...]]:
    found = {name: _opened(value, buffers) for name, value in (*code.free.items(), *code.entries.items())}
    constants: tuple[Constant, ...] = ()
    left = [name for name, value in (*code.free.items(), *code.entries.items()) if isinstance(value, m.Pickled)]
    if left:
        payload, constants = _of_pickle(code.constants, buffers)
        found |= {name: _Pickled(payload, name) for name in left}
    elif code.constants:
        raise wire.WireError("a malformed message: constants of no value")
    entries = tuple(found[name] for name in code.entries)
    namespace = {"__name__": code.module, "__package__": code.module.rpartition(".")[0]}
    namespace |= {name: found[name] for name in code.free}
    body = Body(_compiled(code), namespace, entries, _plain(code))
    pickled = dumps(tuple(body), frozenset())
    there = {constant.digest: constant for constant in (*pickled.constants, *constants)}
    return VERSION + pickled.payload, tuple(there.values())


def _of_pickle(digests: Sequence[bytes], buffers: wire.Buffers) -> tuple[bytes, tuple[Constant, ...]]:
    payload = bytes(buffers.take())
    return payload, tuple(_constant(digest, buffers.take()) for digest in digests)


def _constant(digest: bytes, content: memoryview) -> Constant:
    """A constant of a client. It is kept for others under what is in it, so that is not believed but computed."""
    if hashlib.sha256(content).digest() != digest:
        raise wire.WireError("a malformed message: a constant is not what its digest says")
    return Constant(digest, torch.frombuffer(bytearray(content), dtype=torch.uint8))


def _opened(value: m.Outer, buffers: wire.Buffers) -> Any:
    match value:
        case m.Module():
            return _Reference(value.reference)
        case m.Import():
            return _Imported(value.module, value.path)
        case m.Value():
            return buffers.unpack(buffers.open(value.value, _values))
        case m.Pickled():
            return None


def _plain(code: m.Source) -> tuple[Form, ...] | None:
    """A text that can be compiled, as data, where it is of few forms."""
    try:
        return plain(parsed(code.text, code.first_line), code.class_name)
    except RecursionError:
        return None


def _compiled(code: m.Source) -> bytes:
    written = Written(
        text=code.text,
        first_line=code.first_line,
        lines=code.lines,
        parameters=tuple(code.parameters),
        free=tuple(code.free),
        entries=tuple(code.entries),
        qualname=code.qualname,
        class_name=code.class_name,
        annotations=code.annotations,
        module=code.module,
    )
    if not all(name.isidentifier() for name in (*written.parameters, *written.entries, code.class_name or "x")):
        raise ValueError("a block of Python whose names are none")
    try:
        return code_of(written, written.entries, code.filename, code.function)
    except (SyntaxError, CaptureError, RecursionError, MemoryError, ValueError) as error:
        raise ValueError(f"a block of Python that cannot be compiled: {error}") from None
