"""What a worker sends home at the end of a step: one message with the frames of all runs, and flat tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec
import torch

from nnsight_async.runs.packing import Flat, Kind, unpack

Buffer = bytes | bytearray | memoryview


class Frame(msgspec.Struct, array_like=True):
    """One run at the end of one step.

    `step` counts forward passes of the run; 0 is the prefill. `done` says that the block has ended, `stopped` that it
    asked for the request to end here, `ended` that the entries were saved after the last step, and `error` holds what
    it raised (see `failures`). `printed` is what it printed, `warned` what it warned of: category, message, file, line.
    An entry has a name, an operation and a packed value; all together took `size` bytes of the run's budget.
    `part` says which of the blocks of the request it comes from: its edits in their order, and then its own.
    """

    key: int
    step: int
    entries: list[tuple[str, str, Any]] = []
    done: bool = False
    stopped: bool = False
    ended: bool = False
    error: bytes | None = None
    printed: str = ""
    warned: list[tuple[str, str, str, int]] = []
    size: int = 0
    part: int = 0


class Message(msgspec.Struct, array_like=True):
    """The frames of a step, and what the flat tensors that their entries refer to."""

    kinds: list[Kind]
    frames: list[Frame]


def encode(message: Message, flats: Sequence[torch.Tensor]) -> list[Buffer]:
    """The parts to send: a header, and a buffer for each flat tensor. They must be on the CPU by now."""
    return [_encoder.encode(message), *map(_buffer, flats)]


def decode(parts: Sequence[Buffer]) -> list[Frame]:
    """The frames of a message, with the values of their entries rebuilt; `ValueError` for a malformed one."""
    try:
        message = _decoder.decode(parts[0])
        flats = [Flat.of(kind, part) for kind, part in zip(message.kinds, parts[1:], strict=True)]
        for frame in message.frames:
            frame.entries = [(name, operation, unpack(value, flats)) for name, operation, value in frame.entries]
    except (msgspec.MsgspecError, IndexError, TypeError, RuntimeError, KeyError, ValueError) as error:
        raise ValueError(f"a malformed message came from the worker: {error}") from error
    return message.frames


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def _buffer(flat: torch.Tensor) -> Buffer:
    return memoryview(cast("Any", flat.view(torch.uint8).numpy())) if flat.numel() else b""
