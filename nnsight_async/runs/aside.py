"""Work in a thread for which nobody waits at the end of the event loop or of the interpreter."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def aside(function: Callable[[], T], name: str) -> T:
    """What `function` returns or raises, called in a thread of that name."""
    done: Future[T] = Future()
    threading.Thread(target=_fulfil, args=(done, function), name=name, daemon=True).start()
    return await asyncio.wrap_future(done)


def _fulfil(future: Future[T], function: Callable[[], T]) -> None:
    future.set_running_or_notify_cancel()
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
