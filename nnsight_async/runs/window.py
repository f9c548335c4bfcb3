"""The runs of a map that are in flight, and their results until somebody takes them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from nnsight_async.runs.signal import Signal

if TYPE_CHECKING:
    from nnsight_async.runs.job import Job


@dataclass(frozen=True, slots=True)
class MapResult:
    """What `model.map` gives for one prompt.

    Attributes:
        index: the number of the prompt, from 0.
        prompt: the prompt as it was given.
        output: vLLM's `RequestOutput`; None after an error.
        saves: the final saved values by name; lists of n with `n` above 1.
        error: what ended the run or kept it from starting; None unless `return_errors` was asked for.
    """

    index: int
    prompt: Any
    output: Any = None
    saves: dict[str, Any] = field(default_factory=dict[str, Any])
    error: BaseException | None = None


class Window:
    """At most `concurrency` runs go at a time, and as many results wait to be taken."""

    def __init__(self, concurrency: int, *, ordered: bool) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {concurrency}")
        self.changed = Signal()
        self._concurrency = concurrency
        self._ordered = ordered
        self._numbers = count()
        self._held: dict[int, tuple[Any, Job | Exception]] = {}
        self._ended: dict[int, None] = {}
        self._arrivals: deque[int] = deque()  # what the engine's thread reports, until the caller's looks

    @property
    def empty(self) -> bool:
        """Whether nothing is in flight and nothing waits to be taken."""
        return not self._held

    @property
    def has_room(self) -> bool:
        """Whether another run may be added."""
        self._note_arrivals()
        going = len(self._held) - len(self._ended)
        return going < self._concurrency and len(self._held) < 2 * self._concurrency

    @property
    def ready(self) -> bool:
        """Whether there is a result to take."""
        return self._next() is not None

    def add(self, prompt: Any, job: Job) -> None:
        """Hold a run that is about to start."""
        index = next(self._numbers)
        self._held[index] = (prompt, job)
        job.ended.once(lambda: self._arrive(index))

    def add_failed(self, prompt: Any, error: Exception) -> None:
        """Hold the error of a prompt that cannot be run."""
        index = next(self._numbers)
        self._held[index] = (prompt, error)
        self._arrive(index)

    def take(self) -> MapResult:
        """The next result."""
        index = self._next()
        assert index is not None
        prompt, job = self._held.pop(index)
        del self._ended[index]
        if isinstance(job, Exception):
            return MapResult(index, prompt, error=job)
        run = job.failed()
        if run is not None:
            job.hear()
            return MapResult(index, prompt, error=run.error)
        return MapResult(index, prompt, job.outcome(), job.values)

    def cancel(self) -> None:
        """Abort all that is in flight, and drop what was not taken."""
        held, self._held = self._held, {}
        self._ended.clear()
        self._arrivals.clear()
        for _, job in held.values():
            if not isinstance(job, Exception):
                job.cancel()
                job.hear()
        self._arrivals.clear()

    def _arrive(self, index: int) -> None:
        self._arrivals.append(index)
        self.changed.notify()

    def _note_arrivals(self) -> None:
        while self._arrivals:
            self._ended[self._arrivals.popleft()] = None

    def _next(self) -> int | None:
        self._note_arrivals()
        if not self._ordered:
            return next(iter(self._ended), None)
        first = next(iter(self._held), None)
        return first if first in self._ended else None
