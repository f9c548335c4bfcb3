"""Entering and leaving a `with` whose body is not run but captured."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from inspect import currentframe
from types import FrameType, TracebackType
from typing import Any, Generic, TypeVar

from nnsight_async.capture.body import BodyCapture
from nnsight_async.errors import SurfaceError

T = TypeVar("T")


class BodyStatement(ABC):
    """A `with` whose body is not run, but taken when the statement ends. `async with` does the same."""

    _capture: BodyCapture | None = None
    _carries = False
    """Whether names that the code around reads come home without a save, as in a session."""

    @abstractmethod
    def _finish(self, capture: BodyCapture) -> None:
        """The `with` ends: make of its body what it is for."""

    @abstractmethod
    async def _afinish(self, capture: BodyCapture) -> None:
        """The `async with` ends."""

    def _skip(self, frame: FrameType, entered: T) -> T:
        """The last thing before the body, which `frame` will not run; returns `entered`."""
        self._capture = BodyCapture(frame, carries=self._carries)
        self._capture.skip(entered)
        return entered

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        capture = self._left(exc_type, exc, traceback)
        if capture is None:
            return False
        with hidden(exc):
            self._finish(capture)
        return True

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        capture = self._left(exc_type, exc, traceback)
        if capture is None:
            return False
        with hidden(exc):
            await self._afinish(capture)
        return True

    def _left(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> BodyCapture | None:
        """The capture, if the body was skipped (or is empty); None if another exception is on its way."""
        capture, self._capture = self._capture, None
        assert capture is not None
        ours = capture.leave(exc_type, exc, traceback)
        return capture if ours or exc is None else None


@contextmanager
def hidden(signal: BaseException | None) -> Generator[None]:
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


def caller() -> FrameType:
    """The frame that called the method that calls this."""
    frame = currentframe()
    for _ in range(2):
        frame = frame and frame.f_back
    assert frame is not None
    return frame


def check_blocking_allowed(asynchronous: bool, form: str = "with model.trace(...)") -> None:
    """Raise `SurfaceError` where the plain form on an async model would block an event loop."""
    if asynchronous and loop_is_running():
        raise SurfaceError(
            f"`{form}` blocks this thread until the run has ended, and an event loop runs in it: write `async {form}`"
        )


def check_awaiting_allowed(asynchronous: bool, form: str = "with model.trace(...)") -> None:
    """Raise `SurfaceError` where the async form is used on a model of mode "sync"."""
    if not asynchronous:
        raise SurfaceError(f'this model has mode "sync": write `{form}`, or build it with mode="async"')


def loop_is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Ready(Generic[T]):
    """An awaitable that is there already: nothing may run between the entry and the body."""

    def __init__(self, value: T) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, None, T]:
        return self._value
        yield
