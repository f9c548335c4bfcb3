"""Telling waiters in any event loop or thread that a run has changed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar
from weakref import WeakKeyDictionary, ref

Waiter = Callable[[], None]


class Signal:
    """A condition to wait for: from coroutines of any loop with `until`, from threads with `block_until`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finaliser may notify in the middle of anything
        self._waiters: list[Waiter] = []

    def notify(self) -> None:
        """Have everyone who waits look again."""
        with self._lock:
            waiters, self._waiters = self._waiters, []
        for wake in waiters:
            wake()

    def once(self, wake: Waiter) -> None:
        """Call `wake` at the next `notify`, in the thread that gives it."""
        with self._lock:
            self._waiters.append(wake)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Return when `holds()`; it is looked at after each `notify`."""
        while not holds():
            bell = _Bell(asyncio.get_running_loop())
            self.once(bell.ring)
            if holds():
                return
            await bell.future

    def block_until(self, holds: Callable[[], bool], timeout: float | None = None) -> bool:
        """Block this thread until `holds()`; False when `timeout` seconds went by first."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not holds():
            event = threading.Event()
            self.once(event.set)
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            if not holds() and not event.wait(left):
                return False
        return True


class _Bell:
    """Wakes one coroutine, from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.future = loop.create_future()
        self._post = _Post.of(loop)

    def ring(self) -> None:
        self._post.deliver(self.future)


class _Post:
    """Futures to wake in one loop; those of one engine step share one wake-up of that loop."""

    _offices: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, _Post]] = WeakKeyDictionary()

    def __init__(self, wake: Callable[[Callable[[], None]], object]) -> None:
        self._wake = wake
        self._lock = threading.RLock()
        self._futures: list[asyncio.Future[None]] = []

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> _Post:
        post = cls._offices.get(loop)
        if post is None:
            post = cls._offices[loop] = cls(_weakly(loop))
        return post

    def deliver(self, future: asyncio.Future[None]) -> None:
        with self._lock:
            self._futures.append(future)
            first = len(self._futures) == 1
        if first:
            self._wake(self._hand_out)

    def _hand_out(self) -> None:
        with self._lock:
            futures, self._futures = self._futures, []
        for future in futures:
            if not future.done():
                future.set_result(None)


def _weakly(loop: asyncio.AbstractEventLoop) -> Callable[[Callable[[], None]], object]:
    """Schedules in `loop` without keeping it alive; a closed loop has nobody left to wake."""
    reference = ref(loop)

    def schedule(callback: Callable[[], None]) -> None:
        alive = reference()
        if alive is not None:
            with suppress(RuntimeError):
                alive.call_soon_threadsafe(callback)

    return schedule
