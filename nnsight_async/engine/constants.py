"""Which large constants of blocks the worker holds: each is sent once, and stays while it is used or there is room."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from nnsight_async.errors import ShippingError

if TYPE_CHECKING:
    from nnsight_async.capture.constants import Constant

PIECE = 64 << 20
"""Bytes that are sent at once: the engine makes no step while it takes in a piece."""

Ask = Callable[..., Awaitable[Any]]
"""Calls a method of the worker."""


class Constants:
    """The worker's constants, the least recently used first. Lives on the engine's loop.

    This side alone decides what the worker lets go of, so a run never finds one missing.
    """

    def __init__(self, ask: Ask, limit: int) -> None:
        self._ask = ask
        self._limit = limit
        self._held: OrderedDict[bytes, Constant] = OrderedDict()
        self._users: Counter[bytes] = Counter()
        self._moving = asyncio.Lock()

    @asynccontextmanager
    async def on_hand(self, constants: Sequence[Constant]) -> AsyncGenerator[None]:
        """Have the worker hold `constants` from here to the end of the `async with`."""
        digests = [constant.digest for constant in constants]
        self._users.update(digests)
        try:
            for constant in constants:
                await self._provide(constant)
            yield
        finally:
            self._users -= Counter(digests)
            if self._excess(0):
                async with self._moving:
                    await self._make_room(0)

    async def _provide(self, constant: Constant) -> None:
        if constant.digest not in self._held:
            async with self._moving:
                if constant.digest not in self._held:  # another run may have sent it meanwhile
                    await self._make_room(constant.size)
                    await self._send(constant)
                    self._held[constant.digest] = constant
        self._held.move_to_end(constant.digest)

    async def _make_room(self, size: int) -> None:
        """Drop what no run uses, as far as the limit asks for it."""
        dropped: list[bytes] = []
        for digest in [digest for digest in self._held if not self._users[digest]]:
            if not self._excess(size):
                break
            del self._held[digest]
            dropped.append(digest)
        if dropped:
            await self._ask("nnsight_drop", dropped)

    def _excess(self, size: int) -> bool:
        return size + sum(constant.size for constant in self._held.values()) > self._limit

    async def _send(self, constant: Constant) -> None:
        size = constant.size
        try:
            for start in range(0, size, PIECE):
                piece = constant.buffer[start : start + PIECE]
                failure = await self._ask("nnsight_receive", constant.digest, size, start, piece)
                if failure is not None:
                    raise ShippingError(
                        f"a tensor of {size:,} bytes that the block uses cannot be kept in the worker: {failure}"
                    )
        except BaseException:
            with suppress(Exception):  # whatever it was, that is what is reported
                await self._ask("nnsight_drop", [constant.digest])
            raise
