"""What a worker sends home at the end of a step: one message with the frames of all runs, tensors as raw buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec
import torch

from nnsight_async.interleave.saving import Entry

Buffer = bytes | bytearray | memoryview


class Frame(msgspec.Struct, array_like=True):
    """One run at the end of one step.

    `step` counts forward passes of the run; 0 is the prefill. `done` says that the block has ended, `stopped` that it
    asked for the request to end here, `ended` that the entries were saved after the last step, and `error` holds what
    it raised (see `failures`).
    """

    key: int
    step: int
    entries: list[tuple[str, str, Any]] = []
    done: bool = False
    stopped: bool = False
    ended: bool = False
    error: bytes | None = None


def encode(frames: Sequence[tuple[Frame, Sequence[Entry]]]) -> list[Buffer]:
    """Message parts: a header and one buffer per tensor. Tensors must be on the CPU by now."""
    buffers: list[Buffer] = []
    for frame, entries in frames:
        frame.entries = [(entry.name, entry.operation, _pack(entry.value, buffers)) for entry in entries]
    return [_encoder.encode([frame for frame, _ in frames]), *buffers]


def decode(parts: Sequence[Buffer]) -> list[Frame]:
    """Frames of a message, with their values rebuilt; `ValueError` for a malformed one."""
    try:
        frames = _decoder.decode(parts[0])
        for frame in frames:
            frame.entries = [(name, operation, _unpack(value, parts)) for name, operation, value in frame.entries]
    except (msgspec.MsgspecError, IndexError, TypeError, RuntimeError, KeyError) as error:
        raise ValueError(f"a malformed message came from the worker: {error}") from error
    return frames


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Frame])


def _pack(value: Any, buffers: list[Buffer]) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return _pack_tensor(value, buffers)
    if isinstance(value, (list, tuple)):
        tag = "list" if isinstance(value, list) else "tuple"
        return [tag, [_pack(item, buffers) for item in cast("list[Any]", value)]]
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return ["dict", [[_pack(key, buffers), _pack(item, buffers)] for key, item in items]]
    return _pack_plain(value)


def _pack_plain(value: Any) -> list[Any]:
    """A scalar as what it is underneath: `numpy.float64` is a float, a member of an IntEnum an int."""
    if isinstance(value, int) and not isinstance(value, bool):
        return ["plain", int(value)] if value.bit_length() < 64 else ["big", str(int(value))]
    kind: Any = next((kind for kind in (float, str, bytes) if isinstance(value, kind)), None)
    return ["plain", value if kind is None else kind(value)]


def _pack_tensor(tensor: torch.Tensor, buffers: list[Buffer]) -> list[Any]:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.numel():
        buffers.append(memoryview(cast("Any", flat.view(torch.uint8).numpy())))
    else:
        buffers.append(b"")
    return ["tensor", str(tensor.dtype).removeprefix("torch."), list(tensor.shape), len(buffers)]


def _unpack(packed: list[Any], parts: Sequence[Buffer]) -> Any:
    match packed:
        case ["plain", value]:
            return value
        case ["tensor", dtype, shape, part]:
            return _unpack_tensor(dtype, shape, parts[part])
        case ["list", items]:
            return [_unpack(item, parts) for item in items]
        case ["tuple", items]:
            return tuple(_unpack(item, parts) for item in items)
        case ["dict", items]:
            return {_unpack(key, parts): _unpack(item, parts) for key, item in items}
        case ["big", digits]:
            return int(digits)
        case _:
            raise ValueError(f"unknown kind of value {packed[:1]!r}")


def _unpack_tensor(dtype: str, shape: list[int], buffer: Buffer) -> torch.Tensor:
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"unknown dtype {dtype!r}")
    if not len(buffer):
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(buffer), dtype=torch.uint8).view(kind).reshape(shape)
