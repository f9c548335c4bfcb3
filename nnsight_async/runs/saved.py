"""Saved values that may still be on their way."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any

from nnsight_async.errors import SlowConsumerError
from nnsight_async.runs.unread import looked_at

if TYPE_CHECKING:
    from nnsight_async.runs.job import Job

NOT_HERE = "what it stands for is not here before it is awaited"
AWAIT_IT = "await it above the block, and use the value that this gives (in a thread without a loop, `.result()`)"


class Saved:
    """A value that the block saves under one name.

    `await saved` gives the final value, as often as it is awaited; `saved.stream()` gives the value of each step as it
    arrives. Both raise what ended the run, if it failed; `NotSavedError` if the block ended without saving the name.
    Cancelling the task that waits, or a timeout around it, aborts the request unless others read from it too;
    `asyncio.shield(saved)` keeps it.
    A name that several invokes or sequences save has a list of their values.
    """

    __block_refusal__ = NOT_HERE
    __block_advice__ = AWAIT_IT

    def __init__(self, job: Job, name: str) -> None:
        self.name = name
        self._job = job.source(name)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._final().__await__()

    async def stream(self) -> AsyncIterator[Any]:
        """The value of each step that saves one, as soon as the step's token is there.

        Of several invokes or sequences, all values in the order in which they come. Leaving it early aborts the request
        if nobody else reads from it.
        """
        job = self._job
        with job.read(steps=True):
            for at in count():
                await job.changed.until(lambda at=at: len(job.steps) > at or job.settled)
                step = job.step(at)
                if step is None:
                    break
                if step.lost:
                    raise SlowConsumerError(step.lost)
                saves = looked_at(step.saves)
                if self.name in saves:
                    yield saves[self.name]
            job.check(self.name)

    def done(self) -> bool:
        """Whether the final value, or the error that takes its place, is there."""
        return self._job.final(self.name)

    def result(self, timeout: float | None = None) -> Any:
        """The final value, waited for in this thread; `TimeoutError` after `timeout` seconds."""
        with self._job.read():
            there = self._job.changed.block_until(self.done, timeout)
        if not there:
            raise TimeoutError(f"{self.name!r} was not there after {timeout} s")
        return self._job.value(self.name)

    def __repr__(self) -> str:
        return f"<Saved {self.name!r} {'done' if self.done() else 'pending'}>"

    async def _final(self) -> Any:
        with self._job.read():
            await self._job.changed.until(self.done)
        return self._job.value(self.name)


class Saves(Mapping[str, Saved]):
    """The saved values of a run by name. `await saves` gives all final values as a dict."""

    __block_refusal__ = NOT_HERE
    __block_advice__ = AWAIT_IT

    def __init__(self, job: Job) -> None:
        self._job = job

    def __getitem__(self, name: str) -> Saved:
        if self._job.final() and name not in self._names():
            raise KeyError(name)
        return Saved(self._job, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def __await__(self) -> Generator[Any, None, dict[str, Any]]:
        return self._all().__await__()

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """All final values, waited for in this thread; `TimeoutError` after `timeout` seconds."""
        with self._job.read():
            there = self._job.changed.block_until(self._job.final, timeout)
        if not there:
            raise TimeoutError(f"the values were not there after {timeout} s")
        return self._values()

    async def _all(self) -> dict[str, Any]:
        with self._job.read():
            await self._job.changed.until(self._job.final)
        return self._values()

    def _values(self) -> dict[str, Any]:
        self._job.check()
        return dict(self._job.values)

    def _names(self) -> list[str]:
        return list(dict.fromkeys([*self._job.names, *self._job.values]))
