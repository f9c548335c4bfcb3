"""Values at taps that a CUDA graph copies to where they are read when it has been replayed (vLLM 0.33)."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from nnsight_async.worker.stops import Path, each_tensor, reporting

if TYPE_CHECKING:
    from nnsight_async.interleave.interleaver import Interleaver
    from nnsight_async.interleave.locations import Location


class Copies:
    """For steps in which nothing but reading is done: a graph that does not stop for it.

    What is copied lies in memory that all graphs share; a step is read before the next is replayed.
    """

    def __init__(self, interleaver: Interleaver, taps: Iterable[Location], rows: int) -> None:
        """`rows`: the most that a graph has."""
        self._interleaver = interleaver
        self._taps = frozenset(taps)
        self._most = rows
        self._rows = 0
        self._memory: dict[tuple[Location, Path], torch.Tensor] = {}
        self._odd: set[Location] = set()
        """Taps at which something passes that is not laid out by rows, or that pass more than once."""
        self._passed: dict[Location, Any] = {}
        self._recorded: dict[int, dict[Location, Any]] = {}
        """By the rows of a graph, in the order of the model."""

    def serves(self, events: Collection[Location]) -> bool:
        """Whether the graphs copy all that passes at these events."""
        return self._taps.issuperset(events) and self._odd.isdisjoint(events)

    @contextmanager
    def reported(self) -> Generator[None]:
        """Have modules report to what is being recorded, at the taps."""
        with reporting(self._interleaver, self._taps, self._report):
            yield

    def begin(self, rows: int) -> None:
        """What is recorded next is a pass over so many rows."""
        self._rows = rows
        self._passed = self._recorded[rows] = {}

    def warm(self) -> None:
        """What comes next is the pass that is recorded."""
        self._passed.clear()

    def _report(self, event: Location, value: Any) -> Any:
        if event in self._passed:
            self._odd.add(event)
        self._passed[event] = each_tensor(value, lambda path, tensor: self._copied(event, path, tensor))
        return value

    def _copied(self, event: Location, path: Path, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.ndim or tensor.shape[0] != self._rows:
            self._odd.add(event)
            return tensor
        memory = self._memory.get((event, path))
        if memory is None or memory.shape[1:] != tensor.shape[1:]:
            memory = self._memory[event, path] = tensor.new_empty((self._most, *tensor.shape[1:]))
        return memory[: self._rows].copy_(tensor)

    def pass_on(self, rows: int) -> None:
        """The graph of so many rows has been replayed."""
        interleaver = self._interleaver
        for event, value in self._recorded[rows].items():
            if event in interleaver.waiting:
                interleaver.fire(event, value)
