"""Tokens of a run as they are generated."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

from nnsight_async.errors import SlowConsumerError
from nnsight_async.runs.token import Token

if TYPE_CHECKING:
    from nnsight_async.runs.job import Job


class Stream:
    """An async iterator over tokens, and an async context manager. Leaving it early aborts the request.

    A `break` out of `async for token in tracer.stream()` counts as leaving, at once: the iterator dies with the loop.
    Where the stream is kept in a variable, `async with` or `aclose()` say when it is left. Each starts at token 0.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._at = 0
        self._reader = object()
        job.open(self._reader, steps=True)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Token:
        try:
            await self._job.changed.until(self._ready)
        except asyncio.CancelledError:
            self._leave()
            raise
        token = self._next()
        if token is None:
            raise StopAsyncIteration
        return token

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()

    async def aclose(self) -> None:
        """Leave the stream: abort the request if it still goes."""
        self._leave()

    def __iter__(self) -> Iterator[Token]:
        while True:
            self._job.changed.block_until(self._ready)
            token = self._next()
            if token is None:
                return
            yield token

    def __del__(self) -> None:
        self._leave()

    def _ready(self) -> bool:
        return len(self._job.steps) > self._at or self._job.settled

    def _next(self) -> Token | None:
        self._job.warn()
        step = self._job.step(self._at)
        if step is not None and step.token is not None:
            self._at += 1
            if step.lost:
                raise SlowConsumerError(step.lost)
            return step.token
        self._job.check()
        return None

    def _leave(self) -> None:
        self._job.shut(self._reader)
        if not self._job.settled:
            self._job.cancel()
