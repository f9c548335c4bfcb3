"""What a caller holds of a run: its stream, its saved values, its result."""

from __future__ import annotations

from collections.abc import Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from nnsight_async.errors import OutsideBlockError
from nnsight_async.interleave.context import save
from nnsight_async.runs.saved import Saves
from nnsight_async.runs.stream import Stream

if TYPE_CHECKING:
    from nnsight_async.capture.block import Block
    from nnsight_async.runs.request import Request
    from nnsight_async.runs.run import Run


class Launcher(Protocol):
    """What starts runs: a model."""

    def launch(self, request: Request, block: Block) -> Run: ...
    async def alaunch(self, request: Request, block: Block) -> Run: ...


class Outcome:
    """The result of a run: `await` it, or call it to wait in this thread."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait().__await__()

    def __call__(self, timeout: float | None = None) -> Any:
        """vLLM's `RequestOutput` with the final values as `.saves`; `TimeoutError` after `timeout` seconds."""
        return settle(self._run, timeout).outcome()

    async def _wait(self) -> Any:
        await self._run.changed.until(lambda: self._run.settled)
        return self._run.outcome()


def settle(run: Run, timeout: float | None = None) -> Run:
    """Wait in this thread for a run to end; an interrupt of the wait (Ctrl-C) aborts it."""
    try:
        if not run.changed.block_until(lambda: run.settled, timeout):
            raise TimeoutError(f"the run had not ended after {timeout} s")
    except TimeoutError:
        raise
    except BaseException:
        run.cancel()
        raise
    run.warn()
    return run


class Handle:
    """A run that may not have been started yet."""

    saves_by_name = True

    def __init__(self) -> None:
        self._run: Run | None = None

    def stream(self) -> Stream:
        """Tokens as they are generated, from the first on. Leaving it early aborts the request (see `Stream`)."""
        return Stream(self._started())

    @property
    def saves(self) -> Any:
        """Saved values by name: `Saved` objects, or `await saves` for all final values as a dict."""
        return Saves(self._started())

    @property
    def result(self) -> Any:
        """vLLM's `RequestOutput`, with the final values as `.saves`: `await result`, or `result()` in a thread."""
        return Outcome(self._started())

    def attach(self, run: Run) -> None:
        """This is the run, from now on."""
        self._run = run

    async def cancel(self) -> None:
        """Abort the request; does nothing when it has ended."""
        if self._run is not None:
            self._run.cancel()

    def _started(self) -> Run:
        if self._run is None:
            raise OutsideBlockError("the run starts when its `with` block ends; its stream and values are there then")
        return self._run

    def save(self, value: Any, name: str | None = None) -> Any:
        """Mark a value to be sent home; only inside the block."""
        return save(value, name)


class ProbeRun(Handle):
    """A run whose block is a function: `async with model.run(prompt, probe) as run`, or `model.run(...).result()`."""

    def __init__(self, launcher: Launcher, request: Request, block: Block) -> None:
        super().__init__()
        self._launcher = launcher
        self._request = request
        self._block = block

    async def __aenter__(self) -> Self:
        if self._run is None:
            self._run = await self._launcher.alaunch(self._request, self._block)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.cancel()

    def __await__(self) -> Generator[Any, None, Any]:
        return self._whole().__await__()

    async def _whole(self) -> Any:
        async with self:
            return await self.result

    def _started(self) -> Run:
        if self._run is None:
            self._run = self._launcher.launch(self._request, self._block)
        return self._run
