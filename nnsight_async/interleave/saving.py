"""What a block has saved in a step, as entries that can be sent home."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from typing import Any, Literal, cast

import torch

from nnsight_async.errors import SaveBudgetError, SaveError
from nnsight_async.interleave.cache import Cache
from nnsight_async.interleave.counting import counting, versions

Operation = Literal["set", "extend", "update", "append"]

DEEPEST = 100
"""How many containers a saved value may hold in one another."""


@dataclass(slots=True)
class Entry:
    """One change of a saved name: set it, extend the list it holds, update the dict it holds, or append to the lists in
    that dict."""

    name: str
    operation: Operation
    value: Any


@dataclass(slots=True)
class _Tracked:
    """A saved list or dict, with the parts that have been sent.

    One that `nests` others is sent whole at every step, since they may grow unseen.
    """

    container: list[Any] | dict[Any, Any]
    sent: list[Any]
    nests: bool = False
    whole: tuple[Any, ...] | None = None
    """The tuple, where one was saved that holds lists or dicts."""
    watched: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    """Tensors that were sent, and have to be sent again when they are changed in place."""
    versions: list[int] = field(default_factory=list[int])

    def watch(self, parts: Iterable[Any]) -> None:
        """Notice it when tensors among `parts` are changed in place."""
        if not self.nests:
            tensors = counting(parts)
            self.watched += tensors
            self.versions += versions(tensors)

    def rest(self) -> None:
        """Watch none any more."""
        self.watched, self.versions = [], []

    @property
    def changed(self) -> bool:
        """Whether one that is watched was changed."""
        return versions(self.watched) != self.versions


@dataclass(slots=True)
class Saves:
    """The saves of one run.

    A tensor is sent once, at the end of the step, as it was when it was saved; a list or dict is followed from step to
    step, and only what was added is sent. All of it is sent again when something else was done to it, or to a tensor in
    it.
    """

    budget: int
    at_once: bool = True
    """Whether what is saved may be changed in place before the step ends, and so is copied at once."""
    spent: int = 0
    _pending: int = 0
    _fresh: dict[str, Any] = field(default_factory=dict[str, Any])
    _tracked: dict[str, _Tracked] = field(default_factory=dict[str, _Tracked])

    def add(self, name: str, value: Any) -> None:
        check_name(name)
        check(value, name)
        pending = self._pending + size(value) - (size(self._fresh[name]) if name in self._fresh else 0)
        self._check_budget(self.spent + pending)
        self._pending = pending
        self._tracked.pop(name, None)
        self._fresh[name] = snapshot(value) if self.at_once else value

    def copy_at_once(self) -> None:
        """From here on, something may change in place what was saved."""
        if not self.at_once:
            self.at_once = True
            self._fresh = {name: snapshot(value) for name, value in self._fresh.items()}
            for tracked in self._tracked.values():
                tracked.watch(tracked.sent)

    def would_replace(self, name: str, value: Any) -> bool:
        """Whether another value has been saved under `name` in this step."""
        return name in self._fresh and not _equal(self._fresh[name], value)

    def collect(self) -> list[Entry]:
        """Entries for all that was saved or added since the last call; `SaveBudgetError` past the budget."""
        entries = [entry for name, tracked in self._tracked.items() for entry in _added(name, tracked, self.at_once)]
        entries += [self._first(name, value) for name, value in self._fresh.items()]
        self._fresh.clear()
        self._pending = 0
        for entry in entries:
            check(entry.value, entry.name)
            self.spent += size(entry.value)
        self._check_budget(self.spent)
        return entries

    def _check_budget(self, wanted: int) -> None:
        if wanted > self.budget:
            raise SaveBudgetError(
                f"this run has saved {wanted:,} bytes, more than max_save_bytes={self.budget:,}; save less (fewer "
                "rows, fewer steps, a reduction of the value) or build the model with a larger max_save_bytes"
            )

    @property
    def empty(self) -> bool:
        return not self._fresh and not self._tracked

    def _first(self, name: str, value: Any) -> Entry:
        if isinstance(value, Cache):
            self._tracked[name] = _Tracked(value, [value.counts()])
            return Entry(name, "set", value.since({}))
        if isinstance(value, tuple) and _nests([value]):
            parts = list(cast("tuple[Any, ...]", value))
            self._tracked[name] = _Tracked(parts, list(parts), nests=True, whole=value)
            return Entry(name, "set", value)
        if isinstance(value, (list, dict)):
            container = cast("list[Any] | dict[Any, Any]", value)
            parts = _parts(container)
            self._tracked[name] = _Tracked(container, list(parts), _nests(parts))
            if self.at_once:
                self._tracked[name].watch(parts)
            return Entry(name, "set", container.copy())
        return Entry(name, "set", value)


def snapshot(value: Any) -> Any:
    """What a save keeps: the values as they are now. A list or dict is followed instead."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return tuple(map(snapshot, cast("tuple[Any, ...]", value))) if isinstance(value, tuple) else value


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return tensors and one.shape == other.shape and torch.equal(one, other)


def _parts(container: list[Any] | dict[Any, Any]) -> list[Any]:
    """What a container holds, as one list: keys and values of a dict in turns."""
    return container if isinstance(container, list) else list(chain.from_iterable(container.items()))


def _nests(parts: Iterable[Any]) -> bool:
    """Whether something in them can grow."""
    return any(
        isinstance(part, (list, dict)) or (isinstance(part, tuple) and _nests(cast("tuple[Any, ...]", part)))
        for part in parts
    )


def _added(name: str, tracked: _Tracked, watching: bool) -> list[Entry]:
    if isinstance(tracked.container, Cache):
        added = tracked.container.since(tracked.sent[0])
        tracked.sent = [tracked.container.counts()]
        return [Entry(name, "append", added)] if added else []
    container, sent, now = tracked.container, len(tracked.sent), _parts(tracked.container)
    if tracked.nests or len(now) < sent or not all(map(is_, tracked.sent, now)) or tracked.changed:
        tracked.sent, tracked.nests = list(now), _nests(now)
        tracked.rest()
        if watching:
            tracked.watch(now)
        return [Entry(name, "set", container.copy() if tracked.whole is None else tracked.whole)]
    fresh = now[sent:]
    if not fresh:
        return []
    tracked.sent += fresh
    tracked.nests = _nests(fresh)
    if watching:
        tracked.watch(fresh)
    if isinstance(container, list):
        return [Entry(name, "extend", fresh)]
    return [Entry(name, "update", dict(zip(fresh[::2], fresh[1::2], strict=True)))]


def check_name(name: Any) -> None:
    """Raise `SaveError` for a name that is not a string, or that cannot be sent."""
    if not isinstance(name, str) or not name.isprintable():
        raise SaveError(f"a saved value has a printable string as its name, not {name!r}")


def check(value: Any, name: str, depth: int = 0) -> None:
    """Raise `SaveError` for a value that cannot be sent."""
    if value is None or isinstance(value, (bool, int, float, bytes)):
        return
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise SaveError(f"{name!r} holds a tensor of {value.layout}; save a dense one, `value.to_dense()`")
        return
    if isinstance(value, str):
        _check_text(value, name)
    elif depth == DEEPEST:
        raise SaveError(f"{name!r} holds itself, or containers in one another more than {DEEPEST} deep: save its parts")
    elif isinstance(value, (list, tuple)):
        for item in cast("list[Any]", value):
            check(item, name, depth + 1)
    elif isinstance(value, dict):
        for key, item in cast("dict[Any, Any]", value).items():
            check(key, name, depth + 1)
            check(item, name, depth + 1)
    else:
        raise SaveError(
            f"{name!r} holds a {type(value).__qualname__}, which cannot be saved; save tensors, numbers, strings, "
            "None, or lists, tuples and dicts of them"
        )


def _check_text(text: str, name: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise SaveError(f"{name!r} holds text that cannot be written as UTF-8: {error}") from None


def size(value: Any) -> int:
    """Bytes that the tensors and strings of a value take."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, (list, tuple)):
        return sum(size(item) for item in cast("list[Any]", value))
    if isinstance(value, dict):
        return sum(size(item) for item in cast("dict[Any, Any]", value).values())
    return len(value) if isinstance(value, (str, bytes)) else 8
