"""The socket on which workers send what blocks saved."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import zmq

from nnsight_async.runs import frames
from nnsight_async.runs.frames import MARK, Frame, inbox_address
from nnsight_async.runs.kept import Kept
from nnsight_async.runs.unread import Unread

log = logging.getLogger(__name__)

INTERVAL = 1.0
"""Seconds between looks for a mark, and between attempts to open a socket."""

PAUSE = 0.25
"""Seconds between looks at messages that are kept."""

SILENCE = 5
"""How many intervals without any message may pass on the way to a mark."""


class Inbox:
    """Receives on the engine's loop, where it is made, and hands frames on.

    A socket that somebody has closed, or that nothing comes through any more, is replaced by one at another address,
    of which `moved` tells the worker. What was under way is lost, and missed by the runs that it was for.

    The loop watches the socket itself: a message takes a third of the time that it takes with `zmq.asyncio` (27.1).
    """

    def __init__(
        self, home: Path, model: str, deliver: Callable[[Frame | Unread], None], moved: Callable[[], None]
    ) -> None:
        self._home = home
        self._told = {"model": model}
        self._deliver = deliver
        self._moved = moved
        self._numbers = count()
        self._marks = count(1)
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._closing = False
        self._kept = Kept()
        self._looking: asyncio.TimerHandle | None = None
        self._marked = 0
        self.messages = self.frames = self.bytes = 0
        self.damaged = 0
        """Messages that could not be read."""
        try:
            self._open()
        except BaseException:
            self._context.term()
            raise

    def counts(self) -> dict[str, int]:
        """What has come so far."""
        return {"messages": self.messages, "frames": self.frames, "bytes": self.bytes, "damaged": self.damaged}

    @property
    def next_mark(self) -> int:
        """The number for a mark that is to be sent."""
        return next(self._marks)

    async def marked(self, number: int) -> bool:
        """Wait for a mark; False if nothing at all comes for a while. The socket is then replaced."""
        silent = 0
        while self._marked < number and silent < SILENCE and not self._socket.closed:
            before = self.messages
            await asyncio.sleep(INTERVAL)
            silent = silent + 1 if self.messages == before else 0
        if self._marked < number:
            await self._move()
        return self._marked >= number

    async def close(self) -> None:
        self._closing = True
        if self._looking is not None:
            self._looking.cancel()
        self._shut()
        self._context.term()

    def _receive(self) -> None:
        """Take in one message, if there is one. Called when something has come, and again until there is nothing."""
        try:
            if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
            parts = [part.buffer for part in self._socket.recv_multipart(zmq.NOBLOCK, copy=False)]
        except zmq.ZMQError:  # somebody has closed it: a run will miss what it waits for, and have it replaced
            return
        self._loop.call_soon(self._receive)  # others have their turn between two
        self._take(parts)

    def _take(self, parts: Sequence[frames.Buffer]) -> None:
        self.messages += 1
        self.bytes += sum(len(part) for part in parts)
        try:
            found = frames.decode(parts, self.address)
        except ValueError as error:
            self.damaged += 1
            log.warning("what came to the socket for saved values was dropped: %s", error, extra=self._told)
            return
        self.frames += len(found)
        brought = {id(frame.brought): frame.brought for frame in found if isinstance(frame, Unread)}
        if brought:
            self._kept.add(*brought.values())
            self._look_later()
        for frame in found:
            if frame.key == MARK:
                self._marked = max(self._marked, frame.step)
            else:
                self._deliver(frame)

    def _look_later(self) -> None:
        if self._looking is None and not self._closing:
            self._looking = self._loop.call_later(PAUSE, self._look)

    def _look(self) -> None:
        """Messages that are kept when nothing comes are looked at, too."""
        self._looking = None
        self._kept.look()
        if len(self._kept):
            self._look_later()

    async def _move(self) -> None:
        while True:
            self._shut()
            try:
                self._open()
                break
            except (zmq.ZMQError, OSError):
                if self._closing:
                    return
                log.exception(
                    "the socket for saved values cannot be opened; what runs save now is lost", extra=self._told
                )
                await asyncio.sleep(INTERVAL)
        log.warning("the socket for saved values had to be replaced; what was on its way is lost", extra=self._told)
        self._moved()

    def _open(self) -> None:
        """A new address each time: a socket that is closed takes its file with it, some time later."""
        self._home.mkdir(mode=0o700, exist_ok=True)
        self.address = inbox_address(self._home, next(self._numbers))
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        try:
            self._socket.bind(self.address)
        except BaseException:
            self._socket.close(linger=0)
            raise
        self._loop.add_reader(self._descriptor, self._receive)

    def _shut(self) -> None:
        self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=0)
