"""The socket on which workers send what blocks saved."""

from __future__ import annotations

import logging
from collections.abc import Callable

import zmq
import zmq.asyncio

from nnsight_async.runs import frames
from nnsight_async.runs.frames import Frame

log = logging.getLogger(__name__)


class Inbox:
    """Receives on the engine's loop and hands frames on."""

    def __init__(self, address: str, deliver: Callable[[Frame], None]) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(address)
        self._deliver = deliver
        self.messages = 0
        self.bytes = 0

    async def receive(self) -> None:
        """Hand on every frame that comes, until cancelled."""
        while True:
            parts = [part.buffer for part in await self._socket.recv_multipart(copy=False)]
            self.messages += 1
            self.bytes += sum(part.nbytes for part in parts)
            try:
                found = frames.decode(parts)
            except ValueError:
                log.exception("a message of saved values was dropped")
                continue
            for frame in found:
                self._deliver(frame)

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
