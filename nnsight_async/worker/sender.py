"""The socket to the client."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from nnsight_async.runs.frames import Buffer

LINGER = 1000
"""Milliseconds that what was sent last has to get out at the end."""


class Sender:
    """Sends messages in their order, for one thread. What was sent to an address that is gone is lost."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._address = ""

    def send(self, address: str, parts: Sequence[Buffer]) -> None:
        """Send to `address`; returns before it is there."""
        if address != self._address:
            self._connect(address)
        try:
            self._send(parts)
        except zmq.ZMQError:  # somebody has closed the socket
            self._connect(address)
            self._send(parts)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._context.term()

    def _connect(self, address: str) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, LINGER)
        self._socket.connect(address)
        self._address = address

    def _send(self, parts: Sequence[Buffer]) -> None:
        assert self._socket is not None
        self._socket.send_multipart(parts, copy=False)
