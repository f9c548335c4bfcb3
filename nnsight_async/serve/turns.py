"""How much of one client goes on at a server at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class Turns:
    """As many runs at a time, and as many bytes of them, as a server takes of one client; the others wait here."""

    def __init__(self, runs: int, size: int) -> None:
        self._runs = asyncio.Semaphore(runs)
        self._size = size
        self._left = size
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def turn(self, size: int) -> AsyncGenerator[None]:
        """Wait for room for a run of so many bytes, and hold it. One without any is for the server to refuse."""
        size = min(size, self._size)
        async with self._runs:
            while size > self._left:
                await self._freed.wait()
            self._left -= size
            try:
                yield
            finally:
                self._left += size
                freed, self._freed = self._freed, asyncio.Event()
                freed.set()
