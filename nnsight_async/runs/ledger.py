"""Saved values of a run, filed by step until the token of the step is out."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from nnsight_async.errors import SaveError, ValuesLostError
from nnsight_async.runs.frames import Frame

Entry = tuple[str, str, Any]

DONE = sys.maxsize


class Ledger:
    """Files what frames bring, and keeps the value of every name as of the last step that was let out.

    `parts` are the blocks of the request, as an error calls them: each sends frames of its own, and a name is of one.
    """

    def __init__(self, parts: Sequence[str] = ("the block",)) -> None:
        self.values: dict[str, Any] = {}
        self.through = -1
        self.stopped_at: int | None = None
        self.bytes = 0
        """What has been saved so far."""
        self.frames = [0] * len(parts)
        """How many have come, by part."""
        self._parts = parts
        self._reached = [-1] * len(parts)
        self._open = len(parts)
        self._owners: dict[str, int] = {}
        self._filed: dict[int, list[Entry]] = {}
        self._sizes: Counter[int] = Counter()
        self._closing: list[Entry] = []

    @property
    def done(self) -> bool:
        """Whether no block has anything more to say."""
        return not self._open

    def file(self, frame: Frame) -> None:
        """Take a frame in; `SaveError` where two blocks of the request save the same name.

        `ValuesLostError` for one that is damaged, or not the next of its part.
        """
        if frame.damaged or frame.number != self.frames[frame.part]:
            raise lost(frame.step if frame.damaged else self.missing_step, frame.damaged)
        self.frames[frame.part] += 1
        self.bytes += frame.size
        for name, _, _ in frame.entries:
            if self._owners.setdefault(name, frame.part) != frame.part:
                raise SaveError(self._taken(name, frame.part))
        if frame.ended:
            self._closing += frame.entries
        elif frame.entries:
            self._filed.setdefault(frame.step, []).extend(frame.entries)
            self._sizes[frame.step] += frame.size
        self.through = max(self.through, frame.step)
        reached = self._reached[frame.part]
        if frame.done and reached != DONE:
            self._reached[frame.part] = DONE
            self._open -= 1
        elif not frame.done:
            self._reached[frame.part] = max(reached, frame.step)
        if frame.stopped:
            self.stopped_at = frame.step

    def holds(self, step: int) -> bool:
        """Whether all that `step` will save has come."""
        return not self._open or step <= min(self._reached)

    @property
    def missing_step(self) -> int:
        """The first step of which not everything has come."""
        return min(min(self._reached, default=DONE), self.through) + 1

    def misses(self, sent: Mapping[int, int]) -> bool:
        """Whether more has been sent than has come: by part, how many frames; a part that is not there has ended."""
        return any(
            reached != DONE and (part not in sent or sent[part] > self.frames[part])
            for part, reached in enumerate(self._reached)
        )

    def let_out(self, step: int) -> tuple[dict[str, Any], int]:
        """Apply the entries of `step`; returns the values that it saved, and the bytes that came for them."""
        return self._apply(self._filed.pop(step, ())), self._sizes.pop(step, 0)

    def close(self) -> dict[str, Any]:
        """No step comes any more: drop what was filed for steps without a token; returns what was saved last."""
        self._filed.clear()
        closing, self._closing = self._closing, []
        return self._apply(closing)

    def _taken(self, name: str, part: int) -> str:
        return (
            f"{self._parts[part]} saves {name!r}, and {self._parts[self._owners[name]]} does too: give one of them "
            "another name, or clear an edit (model.edits has them; those with a name can be left out with edits=[...])"
        )

    def _apply(self, entries: list[Entry] | tuple[()]) -> dict[str, Any]:
        for name, operation, value in entries:
            self.values[name] = _after(self.values.get(name), operation, value)
        return {name: self.values[name] for name, _, _ in entries}


def lost(step: int, why: str = "") -> ValuesLostError:
    """The error of a run of which something is missing from `step` on."""
    what = f"came damaged ({why})" if why else "were lost"
    return ValuesLostError(f"saved values of step {max(step, 0)} {what} on their way from the worker; run it again")


def _after(before: Any, operation: str, value: Any) -> Any:
    """The value that follows `before`; a new object, because tokens hold the earlier ones."""
    if operation == "extend":
        return [*before, *value]
    if operation == "update":
        return {**before, **value}
    if operation == "append":
        return {**before, **{key: [*before.get(key, ()), *added] for key, added in value.items()}}
    return value
