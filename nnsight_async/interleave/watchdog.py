"""Ends a block that does not come back."""

from __future__ import annotations

import ctypes
import math
import signal
import threading
import time
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import ClassVar

import greenlet

from nnsight_async.errors import BlockTimeoutError
from nnsight_async.interleave.context import UserGreenlet

INTERVAL = 0.1
"""Seconds between looks at the clock."""

SIGNAL = signal.SIGURG
"""What interrupts the thread of the forward pass; nothing happens at this signal otherwise."""

CHANCES = 3
"""How often `Expired` is raised in a block that catches it and goes on, before the block is abandoned."""

ABANDONED = object()
"""What the switch into a block returns that did not end its turn itself. It must never be entered again."""


class Expired(BaseException):
    """Raised in a block whose turn takes too long."""


class Watchdog:
    """Raises `Expired` in a block whose turn takes longer than it may, and takes the thread from one that goes on.

    A thread that watches the clock sends a signal, and Python runs its handler in the block, be that in a loop or in a
    call that waits, like `time.sleep`. Not interrupted are turns in another thread than the main one, where Python
    handles no signals, and calls of C that compute without looking for signals.
    """

    takes_turns = True
    """Whether it takes turns away from greenlets, so that all code of users has to run in one."""
    on_duty: ClassVar[Watchdog | None] = None
    """Whose turn began last."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """What the turns that are over have taken."""
        self.total = 0
        """Strikes so far."""
        self._began = 0.0
        self._deadline = math.inf
        self._strikes = 0
        self._held = False
        self._main = threading.main_thread().ident
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, seconds: float) -> None:
        """A turn of at most `seconds` begins in this thread."""
        if self._thread is None:
            self._start()
        self._strikes = 0
        self._began = time.monotonic()
        self._deadline = self._began + seconds
        Watchdog.on_duty = self

    def end(self) -> None:
        """The turn is over."""
        self._deadline = math.inf
        self.seconds += time.monotonic() - self._began

    @contextmanager
    def held(self) -> Generator[None]:
        """Nothing is raised meanwhile in the block that runs now, which is at something that must be done whole."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        self.strike()

    def close(self) -> None:
        """End the watching thread."""
        self._closing.set()

    def _start(self) -> None:
        self._thread = self._watcher()
        if threading.get_ident() == self._main:
            signal.signal(SIGNAL, _strike)
            self._thread.start()

    def _watcher(self) -> threading.Thread:
        arguments = weakref.ref(self), self._closing
        return threading.Thread(target=_watch, args=arguments, name="nnsight-watchdog", daemon=True)

    def look(self) -> None:
        """Look at the clock. Called by the watching thread, every `INTERVAL`."""
        assert self._main is not None
        if time.monotonic() > self._deadline:
            signal.pthread_kill(self._main, SIGNAL)

    def strike(self) -> None:
        """Raise `Expired` in the block that runs now, or go on without it. Called in the main thread, at any time."""
        stuck = greenlet.getcurrent()
        if self._held or not isinstance(stuck, UserGreenlet) or time.monotonic() <= self._deadline:
            return
        self._strikes += 1
        self.total += 1
        if self._strikes <= CHANCES:
            raise Expired
        # It would be resumed, to unwind, when its last reference goes.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(stuck))
        assert stuck.parent is not None
        stuck.parent.switch(ABANDONED)


def _watch(watchdog: weakref.ref[Watchdog], closing: threading.Event) -> None:
    """Until it is closed, or nobody has it any more."""
    while not closing.wait(INTERVAL) and (awake := watchdog()) is not None:
        awake.look()
        del awake


def _strike(_number: int, _frame: object) -> None:
    if Watchdog.on_duty is not None:
        Watchdog.on_duty.strike()


def timeout_error(seconds: float) -> BlockTimeoutError:
    return BlockTimeoutError(
        f"the block ran for more than {seconds:g} s without coming to its next location; build the model with a larger "
        "block_timeout if it needs that long"
    )


def said(error: BaseException, seconds: float) -> BaseException:
    """What a block raised, as its caller is told of it."""
    return timeout_error(seconds).with_traceback(error.__traceback__) if isinstance(error, Expired) else error
