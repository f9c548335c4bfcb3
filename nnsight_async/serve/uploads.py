"""How many bytes of what each key has sent a server holds."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

LEAVING = 1.0
"""Seconds that a request waits for room. Who ends a run early and sends the next one is heard on two connections, and
the server may hear of the end later."""


class Refused(Exception):  # noqa: N818 -- becomes an answer
    """A request is not taken: the status of the answer, and the error that the client is to raise."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message


class Vacancy:
    """Waits a moment for room, where there is none at once. Lives on one event loop."""

    def __init__(self) -> None:
        self._freed = asyncio.Event()

    def freed(self) -> None:
        """There is more room."""
        self._freed.set()

    async def until(self, there: Callable[[], bool]) -> None:
        """Return when there is room, or when it has been waited for."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVING):
                while not there():
                    self._freed.clear()
                    await self._freed.wait()


class Uploads:
    """Bytes by the name of a key: of requests from when they are announced until they have been answered, which is when
    their runs have ended, and of edits."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._held: Counter[str] = Counter()
        self._room = Vacancy()

    async def wait(self, key: str, size: int) -> None:
        """Wait a moment for room for so many bytes more, if there can be any."""
        if size <= self.most:
            await self._room.until(lambda: self._held[key] + size <= self.most)

    def take(self, key: str, size: int) -> None:
        """So many bytes more; `Refused` where that is too much."""
        if size > self.most:
            raise Refused(413, "ValueError", f"a request of {size:,} bytes; a key may have {self.most:,} together")
        if self._held[key] + size > self.most:
            raise Refused(
                429,
                "ServerError",
                f"the requests and edits of the key {key!r} have more than {self.most:,} bytes together: wait for some "
                "to end",
            )
        self._held[key] += size

    def give(self, key: str, size: int) -> None:
        """They are gone."""
        self._held[key] -= size
        if not self._held[key]:
            del self._held[key]
        self._room.freed()

    def held(self, key: str) -> int:
        return self._held[key]


class Upload:
    """The body of one request on its way in, until its answer is on its way out.

    `announced` bytes are its key's from the beginning, and what comes beyond them as it comes. `most`: bytes after
    which the client counts as gone.
    """

    def __init__(self, receive: Any, send: Any, uploads: Uploads, key: str, announced: int, most: int | None) -> None:
        uploads.take(key, announced)
        self._receive = receive
        self._send = send
        self._ended = False
        self._uploads = uploads
        self._key = key
        self._counted = announced
        self._received = 0
        self._most = most

    async def receive(self) -> Any:
        """What the server of the connection says next."""
        message = await self._receive()
        self._received += len(message.get("body", b""))
        if self._most is not None and self._received > self._most:
            return {"type": "http.disconnect"}
        if self._received > self._counted and not self._ended:
            self._uploads.take(self._key, self._received - self._counted)
            self._counted = self._received
        return message

    async def send(self, message: Any) -> None:
        """What is answered. The end of an answer frees the bytes before the client can see it, and ask for more."""
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.end()
        await self._send(message)

    def end(self) -> None:
        """The request has been answered, or given up."""
        if not self._ended:
            self._ended = True
            self._uploads.give(self._key, self._counted)
