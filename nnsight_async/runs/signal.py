"""Telling waiters in any event loop or thread that a run has changed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from weakref import ref

Waiter = Callable[[], None]


class Signal:
    """A condition to wait for: from coroutines of any loop with `until`, from threads with `block_until`.

    It has no lock, which a finaliser that notifies in the middle of anything could find taken: what is done with a
    deque is done whole.
    """

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: deque[Waiter] = deque()

    def notify(self) -> None:
        """Have everyone who waits look again."""
        for _ in range(len(self._waiters)):
            try:
                wake = self._waiters.popleft()
            except IndexError:  # another thread notifies too
                return
            wake()

    def once(self, wake: Waiter) -> None:
        """Call `wake` at the next `notify`, in the thread that gives it."""
        self._waiters.append(wake)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Return when `holds()`; it is looked at after each `notify`."""
        while not holds():
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()
            self._waiters.append(partial(_Post.of(loop).deliver, future))
            if holds():
                return
            await future

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


class _Post:
    """Futures to wake in one loop; those of one engine step share one wake-up of that loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)
        self._futures: deque[asyncio.Future[None]] = deque()
        self._called = False

    @staticmethod
    def of(loop: asyncio.AbstractEventLoop) -> _Post:
        """That of the loop that runs in this thread."""
        post = _here.post
        if post is None or post._loop() is not loop:
            post = _here.post = _Post(loop)
        return post

    def deliver(self, future: asyncio.Future[None]) -> None:
        self._futures.append(future)
        if not self._called:  # which `_hand_out` takes back before it looks what there is
            self._called = True
            self._call()

    def _call(self) -> None:
        loop = self._loop()
        if loop is not None:
            with suppress(RuntimeError):  # a closed loop has nobody left to wake
                loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        self._called = False
        while self._futures:
            future = self._futures.popleft()
            if not future.done():
                future.set_result(None)


class _Here(threading.local):
    post: _Post | None = None


_here = _Here()
