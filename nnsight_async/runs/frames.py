"""What a worker sends home at the end of a step: one message with the frames of all runs, and flat tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike, fspath
from typing import Any, cast

import msgspec
import torch

from nnsight_async.runs.packing import Flat, Kind, Unreadable, check_together, unpack
from nnsight_async.runs.unread import Brought, Unread

Buffer = bytes | bytearray | memoryview

Entry = tuple[str, str, Any]
"""Name, operation and packed value."""

MARK = 0
"""The key of a frame that is no run's: all that was sent before it has come. Its step numbers it."""


def inbox_address(home: str | PathLike[str], number: int = 0) -> str:
    """Where an engine takes messages in; `number` counts the sockets that it has had."""
    return f"ipc://{fspath(home)}/inbox-{number}"


class Frame(msgspec.Struct, array_like=True):
    """One run at the end of one step.

    `step` counts forward passes of the run; 0 is the prefill. `done` says that the block has ended, `stopped` that it
    asked for the request to end here, `ended` that the entries were saved after the last step, and `error` holds what
    it raised (see `failures`). `printed` is what it printed, `warned` what it warned of: category, message, file, line.
    An entry has a name, an operation and a packed value; all together took `size` bytes of the run's budget.
    `part` says which of the blocks of the request it comes from: its edits in their order, and then its own. `number`
    counts the frames of that part. `damaged` says why the entries could not be read here.
    """

    key: int
    step: int
    entries: list[Entry] = []
    done: bool = False
    stopped: bool = False
    ended: bool = False
    error: bytes | None = None
    printed: str = ""
    warned: list[tuple[str, str, str, int]] = []
    size: int = 0
    part: int = 0
    number: int = 0
    damaged: str = ""


class Together(msgspec.Struct, array_like=True):
    """Several runs at the end of a step that have saved the same: a frame of part 0 for each of `keys`.

    Run `i` is at its step `bases[i] + steps`, and its frame has the number `numbers[i] + steps`. The entries are those
    of the first; the tensors of the others follow in the same flat tensors. Each run's took `size` bytes of its budget.
    """

    keys: list[int]
    bases: list[int]
    numbers: list[int]
    steps: int
    entries: list[Entry]
    size: int

    def frame(self, index: int) -> Frame:
        """That of a run, with no entries."""
        frame = Frame(self.keys[index], self.bases[index] + self.steps)
        frame.size, frame.number = self.size, self.numbers[index] + self.steps
        return frame


class Message(msgspec.Struct, array_like=True):
    """The frames of a step, what the flat tensors are that their entries refer to, and the inbox it is for."""

    kinds: list[Kind]
    frames: list[Frame]
    address: str = ""
    together: list[Together] = []

    @property
    def every(self) -> list[Frame]:
        """All frames, those that are together without entries."""
        return [*self.frames, *(each.frame(index) for each in self.together for index in range(len(each.keys)))]


def encode(message: Message, flats: Sequence[torch.Tensor]) -> list[Buffer]:
    """The parts to send: a header, and a buffer for each flat tensor. They must be on the CPU by now."""
    return [_encoder.encode(message), *map(_buffer, flats)]


def decode(parts: Sequence[Buffer], address: str = "") -> list[Frame | Unread]:
    """The frames of a message to `address`, with the values of their entries rebuilt, or still to be looked at.

    `ValueError` for what is no such message. Where the values of a frame cannot be read, it says so, and the others are
    whole.
    """
    try:
        message = _decoder.decode(parts[0])
    except (msgspec.MsgspecError, IndexError, ValueError) as error:
        raise ValueError(f"a malformed message: {error}") from error
    if message.address != address:
        raise ValueError("a malformed message: it is for another engine")
    apart = len(message.frames) >= sum(len(each.keys) for each in message.together)
    flats = [_flat(kind, part, apart) for kind, part in zip(message.kinds, parts[1:], strict=False)]
    for frame in message.frames:
        _rebuild(frame, flats)
    for flat in flats:
        flat.forget()
    return [*message.frames, *(frame for each in message.together for frame in _apart(each, flats))]


def read(frame: Frame | Unread) -> Frame:
    """The frame, with its values."""
    if isinstance(frame, Frame):
        return frame
    return Frame(frame.key, frame.step, frame.entries, size=frame.size, number=frame.number, damaged=frame.damaged)


def _apart(together: Together, flats: Sequence[Flat | Unreadable]) -> Iterator[Frame | Unread]:
    keys, bases, numbers, steps, entries, size = msgspec.structs.astuple(together)
    if not len(keys) == len(bases) == len(numbers):
        raise ValueError("a malformed message: runs that are together, without their steps or numbers")
    damaged, each = "", 0
    try:
        each = sum([check_together(value, flats, len(keys)) for _, _, value in entries])
    except Exception as error:  # of whatever kind: it was not `pack` that made this
        damaged, entries = f"{type(error).__name__}: {error}", []
    if all(operation == "set" for _, operation, _ in entries):
        brought = Brought(entries, flats, len(keys), each, damaged)
        for index, (key, base, number) in enumerate(zip(keys, bases, numbers, strict=True)):
            yield Unread(key, base + steps, number + steps, size, brought, index)
        return
    for index in range(len(keys)):
        frame = together.frame(index)
        frame.entries = entries
        _rebuild(frame, flats, index)
        yield frame


def _flat(kind: Kind, part: Buffer, apart: bool) -> Flat | Unreadable:
    try:
        return Flat(kind, part, apart=apart)
    except Exception as error:  # of whatever kind: torch has its own for what does not fit
        return Unreadable(str(error))


def _rebuild(frame: Frame, flats: Sequence[Flat | Unreadable], run: int | None = None) -> None:
    try:
        frame.entries = [(name, operation, unpack(value, flats, run)) for name, operation, value in frame.entries]
    except Exception as error:  # of whatever kind: it was not `pack` that made this
        frame.entries, frame.damaged = [], f"{type(error).__name__}: {error}"


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def _buffer(flat: torch.Tensor) -> Buffer:
    if not flat.numel():
        return b""
    if flat.stride() != (1,):  # that of one element may be anything
        flat = flat.as_strided(flat.shape, (1,))
    return memoryview(cast("Any", flat.view(torch.uint8).numpy()))
