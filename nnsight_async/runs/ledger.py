"""Saved values of a run, filed by step until the token of the step is out."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nnsight_async.errors import SaveError, ValuesLostError
from nnsight_async.runs.frames import Frame
from nnsight_async.runs.unread import Unread

DONE = sys.maxsize


class Ledger:
    """Files what frames bring, and keeps the value of every name as of the last step that was let out.

    `parts` are the blocks of the request, as an error calls them: each sends frames of its own, and a name is of one.
    """

    def __init__(self, parts: Sequence[str] = ("the block",)) -> None:
        self.through = -1
        self.complete = -1 if parts else DONE
        """The last step of which all that it saves has come."""
        self.stopped_at: int | None = None
        self.bytes = 0
        """What has been saved so far."""
        self.frames = [0] * len(parts)
        """How many have come, by part."""
        self._parts = parts
        self._reached = [-1] * len(parts)
        self._owners: dict[str, int] = {}
        self._filed: dict[int, list[Frame | Unread]] = {}
        self._closing: list[Frame | Unread] = []
        self._now: tuple[dict[str, Any], Unread | None] = {}, None
        """The values, and those of the newest step if nobody has looked at them. Read from other threads, too."""

    @property
    def values(self) -> dict[str, Any]:
        """The value of each name as it is now."""
        values, newest = self._now
        return values if newest is None else {**values, **newest.values()}

    @property
    def done(self) -> bool:
        """Whether no block has anything more to say."""
        return self.complete == DONE

    def file(self, frame: Frame | Unread) -> None:
        """Take a frame in; `SaveError` where two blocks of the request save the same name.

        `ValuesLostError` for one that is damaged, or not the next of its part.
        """
        if frame.damaged or frame.number != self.frames[frame.part]:
            raise lost(frame.step if frame.damaged else self.missing_step, frame.damaged)
        self.frames[frame.part] += 1
        self.bytes += frame.size
        if len(self._parts) > 1:
            self._check_names(frame)
        if frame.ended:
            self._closing.append(frame)
        elif frame.names if isinstance(frame, Unread) else frame.entries:
            self._filed.setdefault(frame.step, []).append(frame)
        if frame.step > self.through:
            self.through = frame.step
        if frame.done:
            self._reached[frame.part] = DONE
        elif frame.step > self._reached[frame.part]:
            self._reached[frame.part] = frame.step
        self.complete = min(self._reached)
        if frame.stopped:
            self.stopped_at = frame.step

    def holds(self, step: int) -> bool:
        """Whether all that `step` will save has come."""
        return step <= self.complete

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

    def let_out(self, step: int) -> tuple[dict[str, Any] | Unread, int]:
        """Apply the entries of `step`; returns the values that it saved, and the bytes that came for them."""
        found = self._filed.pop(step, ())
        if len(found) != 1 or not isinstance(unread := found[0], Unread):
            return self._apply(found)
        values, newest = self._now
        if newest is not None and newest.names != unread.names:
            values = self.values
        self._now = values, unread
        return unread, unread.size

    def close(self) -> dict[str, Any]:
        """No step comes any more: drop what was filed for steps without a token; returns what was saved last."""
        self._filed.clear()
        closing, self._closing = self._closing, []
        return self._apply(closing)[0]

    def _check_names(self, frame: Frame | Unread) -> None:
        names = frame.names if isinstance(frame, Unread) else [name for name, _, _ in frame.entries]
        for name in names:
            owner = self._owners.setdefault(name, frame.part)
            if owner != frame.part:
                raise SaveError(
                    f"{self._parts[frame.part]} saves {name!r}, and {self._parts[owner]} does too: give one of them "
                    "another name, or clear an edit (model.edits has them; those with a name can be left out with "
                    "edits=[...])"
                )

    def _apply(self, found: Iterable[Frame | Unread]) -> tuple[dict[str, Any], int]:
        saves: dict[str, Any] = {}
        if found:
            self._now = self.values, None
        values, size = self._now[0], 0
        for frame in found:
            size += frame.size
            for name, operation, value in frame.entries:
                if operation != "set":
                    value = _after(values.get(name), operation, value)
                saves[name] = values[name] = value
        return saves, size


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
