"""What a caller holds of a run: its stream, its saved values, its result."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, cast

from nnsight_async.errors import OutsideBlockError
from nnsight_async.interleave.context import save
from nnsight_async.runs.group import planned
from nnsight_async.runs.saved import Saves
from nnsight_async.runs.stream import Stream

if TYPE_CHECKING:
    from nnsight_async.capture.block import Block
    from nnsight_async.capture.body import BodyCapture
    from nnsight_async.runs.job import Job
    from nnsight_async.runs.request import Request


class Launcher(Protocol):
    """What starts runs: a model."""

    def owners(self) -> Sequence[object]:
        """What the modules belong to that blocks of these runs may use."""
        ...

    def launch(self, job: Job) -> None: ...
    async def alaunch(self, job: Job) -> None: ...


class Taking(Protocol):
    """What makes a block of its own kind of a body; others have it as bytes."""

    def take(self, capture: BodyCapture, *tracers: object) -> Block: ...


class Owning(Protocol):
    def owners(self) -> Sequence[object]: ...


def block_of(launcher: Owning, capture: BodyCapture, *tracers: object) -> Block:
    """The body as a block for `launcher`; its code may use the `tracers`."""
    if hasattr(type(launcher), "take"):  # asked of the model itself, it would be looked for among the modules
        return cast("Taking", launcher).take(capture, *tracers)
    return capture.block([*launcher.owners(), *tracers])


class Outcome:
    """The result of a run: `await` it, or call it to wait in this thread."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait().__await__()

    def __call__(self, timeout: float | None = None) -> Any:
        """vLLM's `RequestOutput` with the final values as `.saves`; `TimeoutError` after `timeout` seconds."""
        return settle(self._job, timeout).outcome()

    async def _wait(self) -> Any:
        return (await asettle(self._job)).outcome()


F = TypeVar("F", bound="Job")


def settle(job: F, timeout: float | None = None) -> F:
    """Wait in this thread for the end of what runs; an interrupt of the wait (Ctrl-C) aborts it."""
    with job.read():
        ended = job.ended.block_until(lambda: job.settled, timeout)
    if not ended:
        raise TimeoutError(f"the run had not ended after {timeout} s")
    job.warn()
    return job


async def asettle(job: F) -> F:
    """Wait for the end of what runs; cancelling the wait aborts it."""
    with job.read():
        await job.ended.until(lambda: job.settled)
    job.warn()
    return job


class Handle:
    """A run, or several that belong together, that may not have been started yet."""

    saves_by_name = True

    def __init__(self) -> None:
        self._job: Job | None = None

    def stream(self) -> Stream:
        """Tokens as they are generated, from the first on. Leaving it early aborts the request (see `Stream`)."""
        return Stream(self._started())

    @property
    def saves(self) -> Any:
        """Saved values by name: `Saved` objects, or `await saves` for all final values as a dict."""
        return Saves(self._started())

    @property
    def result(self) -> Any:
        """vLLM's `RequestOutput`, with the final values as `.saves`: `await result`, or `result()` in a thread.

        Of a trace with invokes, the list of theirs.
        """
        return Outcome(self._started())

    def attach(self, job: Job) -> None:
        """This is the run, from now on."""
        self._job = job

    async def cancel(self) -> None:
        """Abort the request; does nothing when it has ended."""
        if self._job is not None:
            self._job.cancel()

    def _started(self) -> Job:
        if self._job is None:
            raise OutsideBlockError("the run starts when its `with` block ends; its stream and values are there then")
        return self._job

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
        if self._job is None:
            job = planned(self._request, self._block)
            await self._launcher.alaunch(job)
            self.attach(job)
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

    def _started(self) -> Job:
        if self._job is None:
            job = planned(self._request, self._block)
            self._launcher.launch(job)
            self.attach(job)
        return super()._started()
