"""Runs that belong together: the sequences of one prompt, the invokes of one trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from itertools import count
from typing import TYPE_CHECKING, Any

from nnsight_async.runs.job import Job
from nnsight_async.runs.run import Run
from nnsight_async.runs.unheard import Hearing

if TYPE_CHECKING:
    from nnsight_async.capture.block import Block
    from nnsight_async.runs.request import Request


def planned(request: Request, block: Block | None) -> Run | Sequences:
    """The run that `request` asks for, not yet started; with `n` above 1, that many."""
    hearing = Hearing()
    runs = [Run(one, block, hearing) for one in request.sequences()]
    return runs[0] if len(runs) == 1 else Sequences(runs)


class Group(Job):
    """Several runs, or groups of them, as one job. What one of them does leaves the others alone."""

    def __init__(self, parts: Sequence[Job]) -> None:
        super().__init__(_union(part.names for part in parts))
        self.parts = tuple(parts)
        self._ends = count(1)  # counts without a lock, which a finaliser could find taken
        for part in parts:
            part.join(self)

    def savers(self, name: str | None) -> Sequence[Job]:
        """The parts that `name` comes from."""
        return self.parts

    def final(self, name: str | None = None) -> bool:
        return all(part.final(name) for part in self.savers(name))

    def failed(self, name: str | None = None) -> Run | None:
        return next(filter(None, (part.failed(name) for part in self.savers(name))), None)

    def warn(self) -> None:
        for part in self.parts:
            part.warn()

    def cancel(self) -> None:
        for part in self.parts:
            part.cancel()

    def hear(self) -> None:
        for part in self.parts:
            part.hear()

    def runs(self) -> Iterator[Run]:
        for part in self.parts:
            yield from part.runs()

    def part_ended(self) -> None:
        """One more part has come to its end."""
        if next(self._ends) == len(self.parts):
            self.end()

    def _saved_names(self) -> tuple[str, ...]:
        return _union([self.names, *(list(part.values) for part in self.parts)])


class Sequences(Group):
    """The runs of one prompt with `n` above 1: every name has a list of n values."""

    @property
    def values(self) -> dict[str, Any]:
        """Lists in the order of the sequences, with None for one that did not save the name."""
        found = [part.values for part in self.parts]
        saved = _union(found)
        return {name: [values.get(name) for values in found] for name in saved}

    def outcome(self) -> Any:
        outputs = [part.outcome() for part in self.parts]
        whole = copy(outputs[0])
        whole.outputs = [_numbered(output.outputs[0], at) for at, output in enumerate(outputs)]
        whole.saves = self.values
        return whole


class Invokes(Group):
    """The runs of several prompts of one trace: a name has its value, or a list if several prompts saved it."""

    def savers(self, name: str | None) -> Sequence[Job]:
        return [part for part in self.parts if name in part.names] or self.parts

    def source(self, name: str) -> Job:
        savers = self.savers(name)
        return savers[0].source(name) if len(savers) == 1 else self

    @property
    def values(self) -> dict[str, Any]:
        """Lists in the order of the invokes. A name that a failed prompt was to save has no value."""
        values: dict[str, Any] = {}
        for name in self._saved_names():
            found = [part.values[name] for part in self.savers(name) if name in part.values]
            if found and self.failed(name) is None:
                values[name] = found if len(found) > 1 else found[0]
        return values

    def outcome(self) -> list[Any]:
        return [part.outcome() for part in self.parts]


def _numbered(completion: Any, index: int) -> Any:
    numbered = copy(completion)
    numbered.index = index
    return numbered


def _union(groups: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for group in groups for name in group))
