"""Ends a block that does not come back, in a thread that no signal reaches."""

from __future__ import annotations

import ctypes
import math
import threading
from threading import get_ident
from time import monotonic

from nnsight_async.interleave.watchdog import Expired, Watchdog

PAUSE = 1.0
"""Seconds until `Expired` is raised once more in a block that has caught it and goes on."""


class ThreadWatchdog(Watchdog):
    """Raises `Expired` in the thread of the model, between two instructions of Python, while a block has its turn.

    A call of C is not interrupted, be it one that computes or one that waits, like `time.sleep`. A turn is never taken
    from a block: one that catches `Expired` gets it again.
    """

    takes_turns = False

    def __init__(self) -> None:
        super().__init__()
        self._striking = threading.Lock()
        self._aims = False
        """Whether a strike may come now: then the end of a turn waits for it, so that none comes after."""
        self._watched = 0

    def begin(self, seconds: float) -> None:
        if self._thread is None and seconds < math.inf:
            self._start()
        self._watched = get_ident()
        self._deadline = monotonic() + seconds

    def end(self) -> None:
        """The turn is over; raises `Expired` if it was struck at its very end, and then is to be called again."""
        self._deadline = math.inf
        if self._aims:
            with self._striking:
                pass

    def _start(self) -> None:
        self._thread = self._watcher()
        self._thread.start()

    def look(self) -> None:
        if monotonic() > self._deadline:
            with self._striking:
                self._aims = True
                self._strike()
                self._aims = False

    def _strike(self) -> None:
        now = monotonic()
        if now > self._deadline and not self._held:
            self._deadline = now + PAUSE
            self.total += 1
            thread, error = ctypes.c_ulong(self._watched), ctypes.py_object(Expired)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, error)
