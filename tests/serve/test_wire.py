"""Messages: what is packed comes back, and bytes that are no message are refused without more."""

from __future__ import annotations

import asyncio
import math
import os
import pickle
import struct
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nnsight_async import SaveError
from nnsight_async.serve import wire
from nnsight_async.serve.extent import extent
from nnsight_async.serve.wire import DTYPES, HEAD, MAGIC, VERSION, Bounds, WireError

ANYTHING = msgspec.msgpack.Decoder(Any)
WIDE = Bounds()
SMALL = Bounds(header=1 << 16, total=1 << 20, items=1000, depth=8)
FUZZED = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])

SHAPES = st.lists(st.integers(0, 4), max_size=4)
TENSORS = st.builds(
    lambda name, shape: torch.randint(0, 2, shape).to(DTYPES[name]),
    st.sampled_from([name for name in DTYPES if name not in ("complex32", "float8_e8m0fnu")]),
    SHAPES,
)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    PLAIN | TENSORS,
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)


def sent(value: Any) -> bytes:
    tensors: list[torch.Tensor] = []
    return wire.encode(wire.pack(value, tensors), tensors)


def received(data: bytes, bounds: Bounds = WIDE) -> Any:
    message = wire.decode(data, ANYTHING, bounds)
    value = message.buffers.unpack(message.body)
    message.buffers.finish()
    return value


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and _bytes(one) == _bytes(other)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(same, one.values(), other.values()))
    return type(one) is type(other) and one == other


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


@FUZZED
@given(VALUES)
def test_every_value_comes_back_as_it_was(value: Any) -> None:
    assert same(received(sent(value)), value)


def test_tensors_have_memory_of_their_own() -> None:
    data = sent(torch.arange(4))
    first, second = received(data), received(data)
    first += 1
    assert second.tolist() == [0, 1, 2, 3]


def test_a_view_is_sent_as_what_it_shows() -> None:
    whole = torch.arange(12.0).view(3, 4)
    assert received(sent(whole.T[1:])).tolist() == whole.T[1:].tolist()
    assert received(sent(torch.tensor([1 + 2j]).conj())).tolist() == [1 - 2j]


@pytest.mark.parametrize("value", [object(), {1, 2}, torch.eye(2).to_sparse(), torch.empty(2, device="meta"), 1j])
def test_other_values_are_not_sent(value: Any) -> None:
    with pytest.raises(SaveError):
        sent(value)


class Bomb:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


def test_a_pickle_is_refused_and_never_loaded(tmp_path: Any) -> None:
    mark = tmp_path / "mark"
    pickled = pickle.dumps(Bomb(str(mark)))
    forged = [pickled, HEAD.pack(MAGIC, VERSION, len(pickled)) + pickled]
    for data in forged:
        with pytest.raises(WireError):
            received(data)
    assert received(sent(pickled)) == pickled  # bytes stay bytes
    assert not mark.exists()


def envelope(body: Any, *buffers: bytes, sizes: list[Any] | None = None, version: int = VERSION) -> bytes:
    sizes = [len(buffer) for buffer in buffers] if sizes is None else sizes
    header = msgspec.msgpack.encode([sizes, body])
    return HEAD.pack(MAGIC, version, len(header)) + header + b"".join(buffers)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "ends in its head"),
        (b"nns\x01", "ends in its head"),
        (b"xyz" + envelope(1)[3:], "no message of nnsight_async"),
        (envelope(1, version=9), "version 9; this side speaks version 1"),
        (HEAD.pack(MAGIC, VERSION, 1 << 30), "1,073,741,824 bytes, of which at most"),
        (envelope(1) + b"x", "not what its head says"),
        (envelope(1, b"abc", sizes=[4]), "not what its head says"),
        (envelope(1, sizes=[-1]), "malformed"),
        (envelope(1, sizes=[1.5]), "malformed"),
        (envelope(1, b"abc"), "more buffers than it names"),
        (envelope([3, 0, "float32", [1]]), "fewer buffers|do not name"),
        (envelope([3, 0, "float32", [2]], b"abcd"), "4 bytes for a tensor"),
        (envelope([3, 0, "float32", [-1]], b"abcd"), "shape"),
        (envelope([3, 0, "float32", [True]], b"abcd"), "shape"),
        (envelope([3, 0, "load", [1]], b"abcd"), "dtype"),
        (envelope([3, 0, "__class__", [1]], b"abcd"), "dtype"),
        (envelope([3, 0, "float32", [0, 1 << 62]]), "shape"),
        (envelope([3, 0, "float32", [0] + [1 << 40] * 15], b""), "shape"),
        (envelope([0, [3, 0, "uint8", [4]], [3, 0, "uint8", [4]]], b"abcd"), "do not name"),
        (envelope([9, 1]), "unknown kind"),
        (envelope([]), "unknown kind"),
        (envelope([[1]]), "unknown kind"),
        (envelope({"a": 1}), "unknown kind"),
        (envelope([2, "key"]), "key without a value"),
        (envelope([2, [0], 1]), "key that cannot be one"),
        (envelope([4, "1" * 5000]), "number"),
        (envelope([4, "12x"]), "number"),
        (envelope([0] * 2000), "too many values"),
    ],
)
def test_what_is_no_message_is_refused_with_a_reason(data: bytes, why: str) -> None:
    with pytest.raises(WireError, match=why):
        received(data, SMALL)


def test_values_deep_in_one_another_are_refused() -> None:
    value: Any = 1
    for _ in range(20):
        value = [0, value]
    with pytest.raises(WireError, match="deep"):
        received(envelope(value), SMALL)
    nested = b"\x91" * 50_000 + b"\x01"
    with pytest.raises(WireError):
        received(HEAD.pack(MAGIC, VERSION, len(nested)) + nested, SMALL)


def test_a_bool_is_one_whatever_its_byte() -> None:
    found = received(envelope([3, 0, "bool", [3]], b"\x00\x01\x7f"))
    assert found.tolist() == [False, True, True]
    assert (found & True).sum().item() == 2


def _count(value: Any) -> int:
    if isinstance(value, list):
        return 1 + sum(map(_count, value))
    return 1 + sum(map(_count, [*value, *value.values()])) if isinstance(value, dict) else 1


@FUZZED
@given(st.deferred(lambda: JSONLIKE), st.integers(0, 40))
def test_values_are_counted_before_they_are_made(value: Any, most: int) -> None:
    data = memoryview(msgspec.msgpack.encode(value))
    assert extent(data, 1 << 20) == _count(value)
    assert extent(data, most) == min(_count(value), most + 1)


@pytest.mark.parametrize("size", [0, 31, 32, 255, 256, 65535, 65536])
def test_long_values_are_one_each(size: int) -> None:
    for value in (
        "x" * size,
        b"x" * size,
        [None] * size,
        dict.fromkeys(range(size)),
        msgspec.msgpack.Ext(7, b"x" * size),
    ):
        counted = (
            1
            if isinstance(value, (str, bytes, msgspec.msgpack.Ext))
            else 1 + len(value) * (1 + isinstance(value, dict))
        )
        assert extent(memoryview(msgspec.msgpack.encode(["a", value, "b"])), 1 << 20) == 3 + counted
    for number in (0, -1, 127, 128, -32, -33, 1 << 15, 1 << 31, 1 << 63, -(1 << 63), 1.5, True, None):
        assert extent(memoryview(msgspec.msgpack.encode([number, number])), 1 << 20) == 3


def test_a_part_that_holds_too_many_values_is_not_decoded() -> None:
    buffers = wire.Buffers([], memoryview(b""), SMALL)
    few, many = msgspec.Raw(msgspec.msgpack.encode([[]] * 999)), msgspec.Raw(msgspec.msgpack.encode([[]] * 1000))
    assert buffers.open(few, ANYTHING) == [[]] * 999
    with pytest.raises(WireError, match="more than 1,000 values"):
        buffers.open(many, ANYTHING)


def _taken(data: bytes) -> None:
    """Nothing but `WireError` may come of bytes from elsewhere, and no more than they are."""
    try:
        value = received(data, SMALL)
    except WireError:
        return
    assert _size(value) <= len(data)


def _size(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, (list, tuple)):
        return sum(map(_size, value))
    return sum(map(_size, value.values())) if isinstance(value, dict) else 0


JSONLIKE = st.recursive(
    PLAIN.filter(lambda value: not isinstance(value, int) or value.bit_length() < 64),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text() | st.integers(0, 9), inner, max_size=3),
    max_leaves=30,
)
HEADS = st.lists(st.sampled_from([0, 1, 2, 3, 4, "float32", "bool", [2], [0], [-1], 1 << 40]) | JSONLIKE, max_size=6)
FORGED = st.builds(
    lambda body, buffers, sizes: envelope(body, *buffers, sizes=sizes),
    HEADS | JSONLIKE,
    st.lists(st.binary(max_size=16), max_size=3),
    st.none() | st.lists(st.integers(0, 20), max_size=3),
)
BROKEN = st.builds(
    lambda value, at, put: (data := sent(value))[: (at := at % len(data))] + put + data[at + len(put) :],
    VALUES,
    st.integers(0, 10_000),
    st.binary(min_size=1, max_size=4),
)
ANY_BYTES = st.binary(max_size=200) | FORGED | BROKEN


@FUZZED
@given(ANY_BYTES)
def test_whatever_bytes_come_are_taken_or_refused(data: bytes) -> None:
    _taken(data)


async def _pieces(data: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def _read(data: bytes, size: int) -> list[Any]:
    found = wire.messages(_pieces(data, size), ANYTHING, SMALL)
    return [message.buffers.unpack(message.body) async for message in found]


@FUZZED
@given(st.lists(VALUES, max_size=4), st.integers(1, 50))
def test_a_stream_comes_in_any_pieces(values: list[Any], size: int) -> None:
    found = asyncio.run(_read(b"".join(map(sent, values)), size))
    assert same(found, values)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (sent(1)[:-1], "ends in a message"),
        (sent(1) + b"n", "ends in a message"),
        (sent(1) + b"garbage!!", "no message"),
        (envelope(1, sizes=[1 << 40]), "of which at most"),
        (HEAD.pack(MAGIC, VERSION, 0xFFFFFFFF), "of which at most"),
    ],
)
def test_a_stream_that_is_none_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(WireError, match=why):
        asyncio.run(_read(data, 7))


def test_the_head_is_what_the_docs_say() -> None:
    data = sent([torch.tensor([1.0, 2.0])])
    magic, version, length = struct.unpack("<3sBI", data[:8])
    assert (magic, version) == (b"nns", 1)
    sizes, body = msgspec.msgpack.decode(data[8 : 8 + length])
    assert (sizes, body) == ([8], [0, [3, 0, "float32", [2]]])
    assert math.isclose(struct.unpack("<f", data[-4:])[0], 2.0)
