"""Ends a block that does not come back."""

from __future__ import annotations

import ctypes
import threading
import time

from nnsight_async.errors import BlockTimeoutError

INTERVAL = 0.1
"""Seconds between looks at the clock."""


class Expired(BaseException):
    """Raised by the watchdog in the thread of the forward pass."""


class Watchdog:
    """Raises `Expired` in the thread of the forward pass when a turn of a block takes longer than it may.

    Only Python code can be interrupted so: a block that hangs in one call of C goes on hanging. `end` swallows an
    exception that has not been raised yet, so that none ever reaches code outside the turn; whoever calls `begin` and
    `end` catches one that is raised between the two, `end` itself included.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._deadline = float("inf")
        self._struck = False
        self._model_thread = 0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, seconds: float) -> None:
        """A turn of at most `seconds` begins in this thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="nnsight-watchdog", daemon=True)
            self._thread.start()
        with self._lock:
            self._model_thread = threading.get_ident()
            self._deadline = time.monotonic() + seconds

    def end(self) -> None:
        """The turn is over."""
        with self._lock:
            self._deadline = float("inf")
            struck, self._struck = self._struck, False
        if struck:
            _swallow()

    def close(self) -> None:
        """End the watching thread."""
        self._closing.set()

    def _watch(self) -> None:
        while not self._closing.wait(INTERVAL):
            with self._lock:
                if time.monotonic() > self._deadline:
                    self._struck = True
                    self._deadline += INTERVAL  # again, if the block catches it and goes on
                    _raise_in(self._model_thread, Expired)


def _swallow() -> None:
    """Have an exception that is on its way to this thread raised here.

    It is not taken back with a null exception: CPython 3.11 then goes on seeing something to handle for ever, and a
    function that is entered under a trace function never gets past its first instruction.
    """
    try:
        for _ in range(1000):  # each time around the interpreter looks for it
            pass
    except Expired:
        pass


def timeout_error(seconds: float) -> BlockTimeoutError:
    return BlockTimeoutError(
        f"the block ran for more than {seconds:g} s without coming to its next location; build the model with a larger "
        "block_timeout if it needs that long"
    )


def _raise_in(thread: int, exception: type[BaseException]) -> None:
    """Have `exception` raised in `thread` when it next looks for something to handle."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(exception))
