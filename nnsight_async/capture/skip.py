"""The body of a `with` that does not run: a trace function raises at its first instruction, for `__exit__` to swallow.

Tracing belongs to a thread and coroutines share threads, so several frames may wait for their body at a time (a later
context manager of an `async with` suspends). One tracer per thread serves them all, and gives way to the trace function
that was there before it when the last has gone.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from nnsight_async.errors import CaptureError

if TYPE_CHECKING:
    from nnsight_async.capture.stop import Stop

TraceFunction = Callable[[FrameType, Any, Any], Any]


class SkipSignal(BaseException):
    """Ends the body of a `with` before it begins; never seen outside that statement."""


class BodySkip:
    """Stops one frame, once."""

    def __init__(self, frame: FrameType, stop: Stop) -> None:
        self.frame = frame
        self.fired = False
        self._stop = stop
        self._signal = SkipSignal()
        self._tracer: _ThreadTracer | None = None
        self._previous: TraceFunction | None = None
        self._lines = self._opcodes = False

    def arm(self) -> None:
        """From now on, reaching the body raises."""
        frame = self.frame
        self._previous, self._lines, self._opcodes = frame.f_trace, frame.f_trace_lines, frame.f_trace_opcodes
        frame.f_trace_lines = True
        if self._stop.opcodes:  # not without need: 3.12 never stops paying for it
            frame.f_trace_opcodes = True
        frame.f_trace = self.trace
        self._tracer = _thread.tracer
        self._tracer.add(self)
        if self._previous is None and _follows_frames_itself(self._tracer.before):
            self._previous = self._tracer.before

    def disarm(self) -> None:
        """Give the frame and the thread their own tracing back."""
        if self._tracer is None:
            return
        self._tracer.remove(self)
        self.frame.f_trace = self._previous
        self.frame.f_trace_lines, self.frame.f_trace_opcodes = self._lines, self._opcodes
        self._tracer = self._previous = None

    def forget(self) -> None:
        """The `with` has been left: nothing keeps its frame, with all its variables, when the function has returned."""
        self._signal.__traceback__ = None

    def caused(self, error: BaseException | None) -> bool:
        """Whether `error` is this skip's signal, alone or wrapped by a task group that is part of the same `with`."""
        if isinstance(error, BaseExceptionGroup):
            return all(map(self.caused, error.exceptions))
        return error is self._signal

    def trace(self, frame: FrameType, event: str, arg: Any) -> TraceFunction:
        """The frame's own trace function."""
        if event in ("line", "opcode") and frame.f_lasti in self._stop.offsets:
            self.fired = True
            raise self._signal
        wanted = {"line": self._lines, "opcode": self._opcodes}.get(event, True)
        if self._previous is not None and wanted:
            self._previous = self._previous(frame, event, arg) or self._previous
        return self.trace

    def resumed(self, previous: TraceFunction | None, arg: Any) -> TraceFunction:
        """The frame is a coroutine that goes on after it was suspended."""
        if previous is not None:
            self._previous = previous(self.frame, "call", arg)
        return self.trace


class _ThreadTracer:
    def __init__(self) -> None:
        self._waiting: dict[FrameType, BodySkip] = {}
        self.before: TraceFunction | None = None
        self._function: TraceFunction = self._trace  # one object, to be known again

    def add(self, skip: BodySkip) -> None:
        if skip.frame in self._waiting:
            code = skip.frame.f_code
            raise CaptureError(
                f"{code.co_filename}, line {skip.frame.f_lineno}: one `with` has one block, so one trace"
            )
        self._waiting[skip.frame] = skip
        present = sys.gettrace()
        if present is not self._function:
            # nothing where we had been: a signal of ours, which clears it, is on its way
            if present is not None or len(self._waiting) == 1:
                self.before = present
            if self.before is not None and _follows_frames_itself(self.before):
                _show_returns(self.before, skip.frame)
            sys.settrace(self._function)

    def remove(self, skip: BodySkip) -> None:
        self._waiting.pop(skip.frame, None)
        present = sys.gettrace()
        if present is not None and present is not self._function:
            return  # somebody else has begun to trace meanwhile
        if self._waiting:
            sys.settrace(self._function)
        elif present is not None or skip.fired:
            self._give_back(skip)

    def _give_back(self, skip: BodySkip) -> None:
        before, self.before = self.before, None
        if before is not None and skip.fired and _follows_frames_itself(before):
            _show_calls(before, skip.frame)  # which also puts it back in its own way
        else:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> TraceFunction | None:
        skip = self._waiting.get(frame)
        try:
            if skip is not None:
                return skip.resumed(self.before, arg)
            return self.before(frame, event, arg) if self.before is not None else None
        finally:
            # coverage's tracer puts itself in our place when it is called
            if self._waiting and sys.gettrace() is not self._function:
                sys.settrace(self._function)


def _show_returns(tracer: TraceFunction, outer: FrameType) -> None:
    """Let `tracer` see how the calls end that it saw begin: those from `outer` to the caller of this."""
    for frame in _frames_inside(outer)[1:]:
        frame.f_trace = frame.f_trace or tracer


def _show_calls(tracer: TraceFunction, outer: FrameType) -> None:
    """Let `tracer` see begin what it will see end: the calls from `outer` to this one."""
    for frame in reversed(_frames_inside(outer)):
        tracer(frame, "call", None)


def _frames_inside(outer: FrameType) -> list[FrameType]:
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not outer and frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _follows_frames_itself(tracer: TraceFunction | None) -> bool:
    """Whether `tracer` is coverage's in C, which loses sight of a frame without `f_trace` once Python has called it."""
    return type(tracer).__module__.partition(".")[0] == "coverage"


class _Thread(threading.local):
    def __init__(self) -> None:
        self.tracer = _ThreadTracer()


_thread = _Thread()
