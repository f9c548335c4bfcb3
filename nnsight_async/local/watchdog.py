"""Ends a block that does not come back, in a thread that no signal reaches."""

from __future__ import annotations

import ctypes
import math
import threading
from threading import get_ident
from time import monotonic

from nnsight_async.interleave.watchdog import INTERVAL, Expired, Watchdog

PAUSE = 1.0
"""Seconds until `Expired` is raised once more in a block that has caught it and goes on."""


class ThreadWatchdog(Watchdog):
    """Raises `Expired` in the thread of the model, between two instructions of Python, while a block has its turn.

    A call of C is not interrupted, be it one that computes or one that waits, like `time.sleep`. A turn is never taken
    from a block: one that catches `Expired` gets it again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._striking = threading.Lock()
        """Held to strike and to end a turn, so that no strike comes after a turn's end."""
        self._watched = 0

    def begin(self, seconds: float) -> None:
        if self._thread is None and seconds < math.inf:
            self._start()
        self._watched = get_ident()
        self._began = now = monotonic()
        self._deadline = now + seconds

    def end(self) -> None:
        """The turn is over; raises `Expired` if it was struck at its very end, and then is to be called again."""
        with self._striking:
            self._deadline = math.inf
        self.seconds += monotonic() - self._began

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._watch, name="nnsight-watchdog", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._closing.wait(INTERVAL):
            with self._striking:
                now = monotonic()
                if now > self._deadline and not self._held:
                    self._deadline = now + PAUSE
                    self.total += 1
                    thread, error = ctypes.c_ulong(self._watched), ctypes.py_object(Expired)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, error)
