"""The messages between a server and its clients: a versioned head, MessagePack, and tensors as raw bytes.

    "nns" | version, 1 byte | length of the MessagePack, 4 bytes, little-endian | MessagePack: [sizes, body] | buffers

Each tensor in a body names the one buffer that is its content. Reading a message runs no code that came with it: what
is not one of the few kinds of values below is a `WireError`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar, cast

import msgspec
import torch

from nnsight_async.errors import SaveError
from nnsight_async.serve.extent import extent

VERSION = 1
CONTENT_TYPE = "application/vnd.nnsight"
HEAD = struct.Struct("<3sBI")
MAGIC = b"nns"

KINDS = """
    float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu
    int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool complex128 complex64 complex32
"""
DTYPES = {name: dtype for name in KINDS.split() if isinstance(dtype := getattr(torch, name, None), torch.dtype)}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

MOST_DIMENSIONS = 16
LONGEST = 1 << 40
"""Of one dimension of a tensor."""

LIST, TUPLE, DICT, TENSOR, BIG = range(5)
"""Heads of the arrays that stand for what MessagePack has not."""

Buffer = bytes | bytearray | memoryview
T = TypeVar("T")


class WireError(ValueError):
    """Bytes that are no message, or one that is too large."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a message may hold."""

    header: int = 8 << 20
    total: int = 1 << 30
    """Bytes of its MessagePack, and of all of it."""
    items: int = 1 << 20
    """Values, of whatever kind, that are in one another."""
    depth: int = 32


class _Envelope(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    sizes: list[Annotated[int, msgspec.Meta(ge=0)]]
    body: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Received(Generic[T]):
    """A message as it came: its body, and the buffers that tensors in it name."""

    body: T
    buffers: Buffers


# -- messages ----------------------------------------------------------------------------------------------------------


def encode(body: Any, tensors: Sequence[torch.Tensor] = ()) -> bytes:
    """A message; `tensors` are those that `pack` took out of values in `body`."""
    contents = [_content(tensor) for tensor in tensors]
    envelope = _encoder.encode(_Envelope([len(each) for each in contents], msgspec.Raw(_encoder.encode(body))))
    return b"".join([HEAD.pack(MAGIC, VERSION, len(envelope)), envelope, *contents])


def decode(data: Buffer, decoder: msgspec.msgpack.Decoder[T], bounds: Bounds) -> Received[T]:
    """One whole message, and nothing after it; `WireError` for anything else."""
    if len(data) > bounds.total:
        raise WireError(f"a message of {len(data):,} bytes, of which at most {bounds.total:,} are taken")
    view = memoryview(data)
    length = header_length(view, bounds)
    end = HEAD.size + length
    if len(view) < end:
        raise WireError("a message that ends in its head")
    envelope = _opened(view[HEAD.size : end])
    if end + sum(envelope.sizes) != len(view):
        raise WireError("a message whose parts are not what its head says")
    return Received(_decoded(envelope.body, decoder), Buffers(envelope.sizes, view[end:], bounds))


def header_length(data: memoryview, bounds: Bounds) -> int:
    """How long the MessagePack of a message is that begins like this."""
    if len(data) < HEAD.size:
        raise WireError("a message that ends in its head")
    magic, version, length = HEAD.unpack_from(data)
    if magic != MAGIC:
        raise WireError("this is no message of nnsight_async")
    if version != VERSION:
        raise WireError(f"a message of version {version}; this side speaks version {VERSION}")
    if length > bounds.header:
        raise WireError(f"a message whose head has {length:,} bytes, of which at most {bounds.header:,} are taken")
    return length


async def messages(
    chunks: AsyncIterator[bytes], decoder: msgspec.msgpack.Decoder[T], bounds: Bounds
) -> AsyncGenerator[Received[T]]:
    """The messages of a stream that comes in pieces; `WireError` if it is not made of messages, or ends in one."""
    held = bytearray()
    needed = HEAD.size
    async for chunk in chunks:
        held += chunk
        while len(held) >= needed:
            complete = _extent(held, bounds)
            if complete is None or len(held) < complete:
                needed = complete or HEAD.size + header_length(memoryview(held)[: HEAD.size], bounds)
                break
            yield decode(bytes(held[:complete]), decoder, bounds)
            del held[:complete]
            needed = HEAD.size
    if held:
        raise WireError("a stream that ends in a message")


def _extent(held: bytearray, bounds: Bounds) -> int | None:
    """How long the message is that `held` begins with; None if that is not known yet."""
    end = HEAD.size + header_length(memoryview(bytes(held[: HEAD.size])), bounds)
    if len(held) < end:
        return None
    whole = end + sum(_opened(held[HEAD.size : end]).sizes)
    if whole > bounds.total:
        raise WireError(f"a message of {whole:,} bytes, of which at most {bounds.total:,} are taken")
    return whole


def _opened(data: Buffer) -> _Envelope:
    try:
        return _envelopes.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise WireError(f"a malformed message: {error}") from None


def _decoded(data: msgspec.Raw, decoder: msgspec.msgpack.Decoder[T]) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise WireError(f"a malformed message: {error}") from None
    except TypeError as error:  # a key that cannot be hashed
        raise WireError(f"a malformed message: {error}") from None


# -- values ------------------------------------------------------------------------------------------------------------


def pack(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` as MessagePack can hold it, its tensors appended to `tensors`; `SaveError` for one of another kind."""
    if value is None or isinstance(value, (bool, str, bytes)):
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int):
        return int(value) if value.bit_length() < 64 else [BIG, str(int(value))]
    if isinstance(value, torch.Tensor):
        return _pack_tensor(value, tensors)
    if isinstance(value, (list, tuple)):
        items = [pack(item, tensors) for item in cast("list[Any]", value)]
        return [LIST if isinstance(value, list) else TUPLE, *items]
    if isinstance(value, dict):
        pairs = cast("dict[Any, Any]", value).items()
        return [DICT, *[part for key, item in pairs for part in (pack(key, tensors), pack(item, tensors))]]
    raise SaveError(f"a value of type {type(value).__qualname__} cannot be sent")


def _pack_tensor(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> list[Any]:
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.dtype not in NAMES:
        raise SaveError(f"only dense tensors can be sent, not one of {tensor.layout} and {tensor.dtype}")
    tensors.append(tensor)
    return [TENSOR, len(tensors) - 1, NAMES[tensor.dtype], list(tensor.shape)]


def _content(tensor: torch.Tensor) -> memoryview:
    plain = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg().reshape(-1)
    return memoryview(cast("Any", plain.view(torch.uint8).numpy())) if plain.numel() else memoryview(b"")


class Buffers:
    """The buffers of one message, each for one tensor: so a message never becomes more than it was on its way."""

    def __init__(self, sizes: Sequence[int], data: memoryview, bounds: Bounds) -> None:
        self._parts = list(_split(sizes, data))
        self._next = 0
        self._items = 0
        self._bounds = bounds

    def take(self) -> memoryview:
        """The next buffer, as it came."""
        if self._next == len(self._parts):
            raise WireError("a malformed message: it has fewer buffers than it names")
        self._next += 1
        return self._parts[self._next - 1]

    def open(self, part: msgspec.Raw, decoder: msgspec.msgpack.Decoder[T]) -> T:
        """A part of the body that has been left as it came, because it may hold values of any kind."""
        if extent(memoryview(part), self._bounds.items) > self._bounds.items:
            raise WireError(f"a malformed message: a part of it holds more than {self._bounds.items:,} values")
        return _decoded(part, decoder)

    def unpack(self, packed: Any, depth: int = 0) -> Any:
        """What `pack` was given; tensors have memory of their own."""
        self._items += 1
        if self._items > self._bounds.items or depth > self._bounds.depth:
            raise WireError("a malformed message: it holds too many values, or values too deep in one another")
        if packed is None or isinstance(packed, (bool, int, float, str, bytes)):
            return packed
        if not isinstance(packed, list) or not packed:
            raise WireError("a malformed message: a value of an unknown kind")
        head, *content = cast("list[Any]", packed)
        if type(head) is not int:
            raise WireError("a malformed message: a value of an unknown kind")
        return self._composed(head, content, depth)

    def finish(self) -> None:
        """Everything has been unpacked: raise `WireError` if there is a buffer that nothing has named."""
        if self._next != len(self._parts):
            raise WireError("a malformed message: it has more buffers than it names")

    def _composed(self, head: int, content: list[Any], depth: int) -> Any:
        if head == TENSOR:
            return self._tensor(content)
        if head == BIG:
            return _big(content)
        if head not in (LIST, TUPLE, DICT):
            raise WireError("a malformed message: a value of an unknown kind")
        items = [self.unpack(item, depth + 1) for item in content]
        if head == LIST:
            return items
        return tuple(items) if head == TUPLE else _dict(items)

    def _tensor(self, content: list[Any]) -> torch.Tensor:
        if len(content) != 3:
            raise WireError("a malformed message: a tensor has a buffer, a dtype and a shape")
        number, name, shape = content
        dtype = DTYPES.get(name) if isinstance(name, str) else None
        if dtype is None or not _is_shape(shape):
            raise WireError(f"a malformed message: a tensor of dtype {str(name)[:40]!r} and shape {str(shape)[:80]}")
        if number != self._next:
            raise WireError("a malformed message: its tensors do not name its buffers in their order")
        data = self.take()
        if len(data) != math.prod(shape) * dtype.itemsize:
            raise WireError(f"a malformed message: {len(data):,} bytes for a tensor {name}{shape}")
        return _tensor(data, dtype, shape)


def _split(sizes: Sequence[int], data: memoryview) -> Iterator[memoryview]:
    start = 0
    for size in sizes:
        yield data[start : start + size]
        start += size


def _is_shape(shape: Any) -> bool:
    if not isinstance(shape, list) or len(cast("list[Any]", shape)) > MOST_DIMENSIONS:
        return False
    return all(type(size) is int and 0 <= size <= LONGEST for size in cast("list[Any]", shape))


def _tensor(data: memoryview, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    if not len(data):
        if math.prod(size or 1 for size in shape) > LONGEST:
            raise WireError(f"a malformed message: a tensor of shape {shape}")
        return torch.empty(shape, dtype=dtype)
    content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    plain = content != 0 if dtype is torch.bool else content.view(dtype)  # a byte of another value is no bool
    return plain.view(shape)


def _big(content: list[Any]) -> int:
    if len(content) != 1 or not isinstance(content[0], str) or len(content[0]) > 4000:
        raise WireError("a malformed message: a number of no known form")
    try:
        return int(content[0])
    except ValueError:
        raise WireError("a malformed message: a number of no known form") from None


def _dict(items: list[Any]) -> dict[Any, Any]:
    if len(items) % 2:
        raise WireError("a malformed message: a key without a value")
    try:
        return dict(zip(items[::2], items[1::2], strict=True))
    except TypeError:
        raise WireError("a malformed message: a key that cannot be one") from None


_encoder = msgspec.msgpack.Encoder()
_envelopes = msgspec.msgpack.Decoder(_Envelope)
