"""Saved values of a run, filed by step until the token of the step is out."""

from __future__ import annotations

from collections import Counter
from typing import Any

from nnsight_async.runs.frames import Frame

Entry = tuple[str, str, Any]


class Ledger:
    """Files what frames bring, and keeps the value of every name as of the last step that was let out."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.through = -1
        self.done = False
        self.stopped_at: int | None = None
        self._filed: dict[int, list[Entry]] = {}
        self._sizes: Counter[int] = Counter()
        self._closing: list[Entry] = []

    def file(self, frame: Frame) -> None:
        """Take a frame in."""
        if frame.ended:
            self._closing += frame.entries
        elif frame.entries:
            self._filed.setdefault(frame.step, []).extend(frame.entries)
            self._sizes[frame.step] += frame.size
        self.through = max(self.through, frame.step)
        self.done = self.done or frame.done
        if frame.stopped:
            self.stopped_at = frame.step

    def holds(self, step: int) -> bool:
        """Whether all that `step` will save has come."""
        return self.done or step <= self.through

    def let_out(self, step: int) -> tuple[dict[str, Any], int]:
        """Apply the entries of `step`; returns the values that it saved, and the bytes that came for them."""
        return self._apply(self._filed.pop(step, ())), self._sizes.pop(step, 0)

    def close(self) -> dict[str, Any]:
        """No step comes any more: drop what was filed for steps without a token; returns what was saved last."""
        self._filed.clear()
        closing, self._closing = self._closing, []
        return self._apply(closing)

    def _apply(self, entries: list[Entry] | tuple[()]) -> dict[str, Any]:
        for name, operation, value in entries:
            self.values[name] = _after(self.values.get(name), operation, value)
        return {name: self.values[name] for name, _, _ in entries}


def _after(before: Any, operation: str, value: Any) -> Any:
    """The value that follows `before`; a new object, because tokens hold the earlier ones."""
    if operation == "extend":
        return [*before, *value]
    if operation == "update":
        return {**before, **value}
    if operation == "append":
        return {**before, **{key: [*before.get(key, ()), *added] for key, added in value.items()}}
    return value
