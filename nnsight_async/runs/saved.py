"""Saved values that may still be on their way."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnsight_async.runs.run import Run


class Saved:
    """A value that the block saves under one name.

    `await saved` gives the final value, as often as it is awaited; `saved.stream()` gives the value of each step as it
    arrives. Both raise what ended the run, if it failed; `NotSavedError` if the block ended without saving the name.
    """

    def __init__(self, run: Run, name: str) -> None:
        self.name = name
        self._run = run

    def __await__(self) -> Generator[Any, None, Any]:
        return self._final().__await__()

    async def stream(self) -> AsyncIterator[Any]:
        """The value of each step that saves one, in order, as soon as the step's token is there."""
        run, at = self._run, 0
        while True:
            await run.changed.until(lambda at=at: len(run.ledger.history) > at or run.settled)
            if at >= len(run.ledger.history):
                break
            saved = run.ledger.history[at]
            at += 1
            if self.name in saved:
                yield saved[self.name]
        run.check()

    def done(self) -> bool:
        """Whether the final value, or the error that takes its place, is there."""
        return self._run.values_final

    def result(self, timeout: float | None = None) -> Any:
        """The final value, waited for in this thread; `TimeoutError` after `timeout` seconds."""
        if not self._run.changed.block_until(self.done, timeout):
            raise TimeoutError(f"{self.name!r} was not there after {timeout} s")
        return self._run.value(self.name)

    def __repr__(self) -> str:
        return f"<Saved {self.name!r} {'done' if self.done() else 'pending'}>"

    async def _final(self) -> Any:
        await self._run.changed.until(self.done)
        return self._run.value(self.name)


class Saves(Mapping[str, Saved]):
    """The saved values of a run by name. `await saves` gives all final values as a dict."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __getitem__(self, name: str) -> Saved:
        if self._run.values_final and name not in self._run.ledger.values and name not in self._run.names:
            raise KeyError(name)
        return Saved(self._run, name)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._run.names, *self._run.ledger.values]))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __await__(self) -> Generator[Any, None, dict[str, Any]]:
        return self._all().__await__()

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """All final values, waited for in this thread; `TimeoutError` after `timeout` seconds."""
        if not self._run.changed.block_until(lambda: self._run.values_final, timeout):
            raise TimeoutError(f"the values were not there after {timeout} s")
        return self._values()

    async def _all(self) -> dict[str, Any]:
        await self._run.changed.until(lambda: self._run.values_final)
        return self._values()

    def _values(self) -> dict[str, Any]:
        self._run.check()
        return dict(self._run.ledger.values)
