"""A run whose tokens and values go on to a client, as they come."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nnsight_async.errors import SlowConsumerError
from nnsight_async.runs.carried import carried, carry, rebuilt
from nnsight_async.runs.frames import read
from nnsight_async.runs.run import Run
from nnsight_async.serve import messages as m
from nnsight_async.serve import wire
from nnsight_async.serve.outputs import to_delta
from nnsight_async.serve.program import PLACE

if TYPE_CHECKING:
    from nnsight_async.capture.block import Block
    from nnsight_async.runs.edit import Installed
    from nnsight_async.runs.frames import Frame
    from nnsight_async.runs.request import Request
    from nnsight_async.runs.unread import Unread

OUTPUT_BYTES = 256
"""What a message without tensors counts as."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A message that its client has not taken yet."""

    message: m.Reply
    tensors: list[torch.Tensor]
    size: int


class Relay(Run):
    """Joins tokens and values as any run does, to know when it has ended, and hands on all that it is fed.

    Lives on the engine's loop, and so does who reads it. `limit`: bytes that may wait for a client that is slow to
    take them; beyond that the run fails. `owns` says of which edits the client may hear what they print and warn of.
    """

    def __init__(self, request: Request, block: Block | None, limit: int, owns: Callable[[Installed], bool]) -> None:
        super().__init__(request, block)
        self.unpack = rebuilt
        self._limit = limit
        self._owns = owns
        self._waiting: deque[Waiting] = deque()
        self._held = 0
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def begin(self) -> None:
        """The engine has taken the run: say which edits it runs."""
        parts = [
            m.Part(edit.name, edit.block.filename.rpartition("/")[2], edit.block.first_line) for edit in self.edits
        ]
        self._waiting.appendleft(Waiting(m.Begun(parts, bool(self.ops)), [], OUTPUT_BYTES))
        self.ended.once(self._wake)
        self._news.set()

    def feed_output(self, output: Any) -> None:
        if not self.settled:
            self._put(to_delta(output, first=self.output is None), [])
        super().feed_output(output)

    def feed_frame(self, frame: Frame | Unread) -> None:
        if self.settled:
            return
        frame = read(frame)
        if frame.error is not None:
            frame.error = carried(frame.error, self._keeps(frame.part))
        printed, warned = (frame.printed, frame.warned) if self._hears(frame.part) else ("", [])
        tensors: list[torch.Tensor] = []
        entries = [(name, operation, wire.pack(value, tensors)) for name, operation, value in frame.entries]
        self._put(
            m.Saved(
                step=frame.step,
                entries=entries,
                done=frame.done,
                stopped=frame.stopped,
                ended=frame.ended,
                error=frame.error,
                printed=printed,
                warned=warned,
                size=frame.size,
                part=frame.part,
                number=frame.number,
            ),
            tensors,
        )
        frame.warned = []
        if printed:
            frame.printed = ""  # which is the client's to show; the others' is shown here
        super().feed_frame(frame)

    async def messages(self, beat: float) -> AsyncGenerator[bytes]:
        """All that is said of the run, to its end; something at least every `beat` seconds."""
        while True:
            while self._waiting:
                first = self._waiting.popleft()
                self._held -= first.size
                yield wire.encode(first.message, first.tensors)
            if self.settled:
                break
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(beat):
                    await self._news.wait()
                continue
            yield wire.encode(m.Alive())
        self.hear()
        if self.error is not None:
            yield wire.encode(m.Failed(carry(self.error)))
        yield wire.encode(m.Ended())

    def _put(self, message: m.Reply, tensors: list[torch.Tensor]) -> None:
        size = OUTPUT_BYTES + sum(tensor.nbytes for tensor in tensors)
        self._held += size
        if self._held > self._limit:
            self.fail(
                SlowConsumerError(
                    f"more than {self._limit:,} bytes waited for the client of this run; read faster, or save less"
                )
            )
            return
        self._waiting.append(Waiting(message, tensors, size))
        self._news.set()

    def _hears(self, part: int) -> bool:
        return part >= len(self.edits) or self._owns(self.edits[part])

    def _keeps(self, part: int) -> Callable[[str], bool]:
        """Which places the client may be told of: those of its own text, and of an own block of Python every one."""
        own = self.block is not None and self.block.filename != PLACE and part == len(self.edits)
        return lambda filename: own or filename == PLACE

    def _wake(self) -> None:
        """Called from whatever thread settles the run."""
        with suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._news.set)
