"""The `with` form: its body becomes the block of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from inspect import currentframe
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from nnsight_async.capture.body import BodyCapture
from nnsight_async.errors import OutsideBlockError, SurfaceError
from nnsight_async.runs.handle import Handle, Launcher, settle
from nnsight_async.runs.saved import Saved

if TYPE_CHECKING:
    from nnsight_async.interleave.tracer import Iterations
    from nnsight_async.runs.request import Request

T = TypeVar("T")


class Tracer(Handle):
    """What `with model.trace(...) as tracer` gives: inside the body it drives the block, after it, it is the run."""

    def __init__(self, asynchronous: bool) -> None:
        super().__init__()
        self._asynchronous = asynchronous

    @property
    def saves(self) -> Any:
        """Saved values by name. Async: `Saved` objects, `await saves` for all; sync: a dict of the values."""
        found = super().saves
        return found if self._asynchronous else found.result()

    @property
    def result(self) -> Any:
        """vLLM's `RequestOutput` with the final values as `.saves`; in async mode, `await tracer.result`."""
        found = super().result
        return found if self._asynchronous else found()

    @property
    def iter(self) -> Iterations:
        """Steps to follow; only inside the block."""
        raise _outside("tracer.iter")

    def all(self) -> Iterator[int]:
        """All steps; only inside the block."""
        raise _outside("tracer.all()")

    def stop(self) -> NoReturn:
        """End the request at this step; only inside the block (outside: `cancel`)."""
        raise _outside("tracer.stop()")

    def __block_reference__(self) -> tuple[str, ...]:
        return ("tracer",)


def _outside(what: str) -> OutsideBlockError:
    return OutsideBlockError(f"{what} belongs inside the `with model.trace(...)` block")


class Trace:
    """The context manager that `model.trace` returns.

    `with` waits for the run and gives values; on a model of mode "async" it serves threads that have no event loop.
    `async with` gives `Saved` objects.
    """

    def __init__(self, launcher: Launcher, request: Request, asynchronous: bool) -> None:
        self._launcher = launcher
        self._request = request
        self._asynchronous = asynchronous
        self._tracer = Tracer(asynchronous)
        self._capture: BodyCapture | None = None

    def __enter__(self) -> Tracer:
        if self._asynchronous and _loop_is_running():
            raise SurfaceError(
                "`with model.trace(...)` blocks this thread until the run has ended, and an event loop runs in it: "
                "write `async with model.trace(...)`"
            )
        self._tracer = Tracer(asynchronous=False)
        return self._enter(_caller())

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        capture = self._left(exc_type, exc, traceback)
        if capture is None:
            return False
        with _hidden(exc):
            block = capture.block()
            run = self._launcher.launch(self._request, block)
            self._tracer.attach(run)
            settle(run).check()
        capture.bind({name: run.ledger.values[name] for name in block.names if name in run.ledger.values})
        return True

    def __aenter__(self) -> _Ready[Tracer]:
        if not self._asynchronous:
            raise SurfaceError(
                'this model has mode "sync": write `with model.trace(...)`, or build it with mode="async"'
            )
        return _Ready(self._enter(_caller()))

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        capture = self._left(exc_type, exc, traceback)
        if capture is None:
            return False
        with _hidden(exc):
            block = capture.block()
            run = await self._launcher.alaunch(self._request, block)
            self._tracer.attach(run)
        capture.bind({name: Saved(run, name) for name in block.names})
        return True

    def _enter(self, frame: FrameType) -> Tracer:
        self._capture = BodyCapture(frame)
        self._capture.skip(self._tracer)
        return self._tracer

    def _left(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> BodyCapture | None:
        """The capture, if the body was skipped (or is empty); None if another exception is on its way."""
        capture, self._capture = self._capture, None
        assert capture is not None
        ours = capture.leave(exc_type, exc, traceback)
        return capture if ours or exc is None else None


@contextmanager
def _hidden(signal: BaseException | None) -> Generator[None]:
    """Raise errors without our own signal, which ended the body, as what was being handled."""
    try:
        yield
    except BaseException as error:
        _cut(error, signal)
        raise


def _cut(error: BaseException | None, signal: BaseException | None) -> None:
    while error is not None and signal is not None:
        if error.__context__ is signal:
            error.__context__ = None
        error = error.__cause__ or error.__context__


def _caller() -> FrameType:
    """The frame that is entering our `with`: the one that called the method that calls this."""
    frame = currentframe()
    for _ in range(2):
        frame = frame and frame.f_back
    assert frame is not None
    return frame


def _loop_is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class _Ready(Generic[T]):
    """An awaitable that is there already: nothing may run between the entry and the body."""

    def __init__(self, value: T) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, None, T]:
        return self._value
        yield
