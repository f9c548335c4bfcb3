"""Host time of the parts of our worker. vLLM mixes the class into the worker; it does nothing until it is started."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from nnsight_async.worker import outbox


class Stopwatch:
    """CPU seconds of their thread that wrapped methods take, calls of one another left out."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._undo: list[Callable[[], None]] = []
        self._inner = 0.0

    def wrap(self, owner: Any, method: str, name: str, *, alone: bool = False) -> None:
        """Time `owner.method` as `name`; `alone` for one that runs on a thread of its own."""
        original = getattr(owner, method)
        had = method in vars(owner)
        setattr(owner, method, self._timed(original, name) if not alone else self._timed_alone(original, name))
        self._undo.append(lambda: setattr(owner, method, original) if had else delattr(owner, method))

    def stop(self) -> None:
        """Take the wrappers off."""
        while self._undo:
            self._undo.pop()()

    def _timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            outer, self._inner = self._inner, 0.0
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.thread_time() - start
                self.seconds[name] += spent - self._inner
                self._inner = outer + spent

        return timed

    def _timed_alone(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.thread_time() - start

        return timed


class WorkerStopwatch:
    """Methods for `collective_rpc`."""

    nnsight_blocks: Any
    nnsight_outbox: Any

    def stopwatch_start(self) -> None:
        """Begin to measure."""
        watch = self._stopwatch = Stopwatch()
        blocks = self.nnsight_blocks
        for method in ("schedule", "begin_step", "begin_sampling", "end_step"):
            watch.wrap(blocks, method, method)
        watch.wrap(blocks.interleaver, "fire", "fire")
        watch.wrap(self.nnsight_outbox, "flush", "flush")
        watch.wrap(outbox.frames, "encode", "sender: encode", alone=True)

    def stopwatch_stop(self) -> dict[str, float]:
        """End it; CPU seconds by part."""
        self._stopwatch.stop()
        return dict(self._stopwatch.seconds)
