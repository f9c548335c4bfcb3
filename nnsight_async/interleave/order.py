"""The order in which one forward pass goes by the locations, as recorded at boot."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from nnsight_async.interleave.locations import LOGITS, SAMPLES, Location

UNKNOWN = -1
_LAST = 1 << 60


class Order:
    """Event indices by location; a module called several times in a pass has several."""

    def __init__(self, entries: Mapping[str, tuple[int, ...]], exits: Mapping[str, tuple[int, ...]]) -> None:
        self._indices: dict[Location, tuple[int, ...]] = {LOGITS: (_LAST,), SAMPLES: (_LAST + 1,)}
        for path, indices in entries.items():
            self._indices[Location(path, "inputs")] = indices
        for path, indices in exits.items():
            self._indices[Location(path, "output")] = indices
        self._calls = {path: tuple(zip(indices, exits[path], strict=True)) for path, indices in entries.items()}

    def late(self, event: Location) -> bool:
        """Whether `event` lies behind the model's own forward pass, where logits are made and tokens drawn."""
        if not event.in_model:
            return True
        calls, (_, end) = self._calls.get(event.path), (self._calls.get("") or ((0, _LAST),))[-1]
        return bool(calls) and all(entry > end for entry, _ in calls)

    def called(self) -> list[str]:
        """Paths of the modules that a forward pass calls."""
        return [event.path for event, indices in self._indices.items() if event.kind == "output" and indices]

    def after(self, event: Location, clock: int) -> int | None:
        """Index of the next passage after `clock`; None when the last has gone by, UNKNOWN when none was recorded."""
        indices = self._indices.get(event)
        if not indices:
            return self._during(event, clock) if event.operation else UNKNOWN
        at = bisect_right(indices, clock)
        return indices[at] if at < len(indices) else None

    def only(self, event: Location) -> int | None:
        """Index of the passage at `event`, where it is known that a forward pass has one."""
        indices = self._indices.get(event, ())
        return indices[0] if len(indices) == 1 else None

    def once(self, path: str) -> bool:
        """Whether a pass is known to call the module at `path` once."""
        return len(self._calls.get(path, ())) == 1

    def passage(self, event: Location, clock: int) -> int:
        """How many passages at `event` came before that at `clock`; of an operation, how many calls of its module."""
        entries = Location(event.path, "inputs")
        indices = self._indices.get(entries if event.operation else event, ())
        return max(bisect_right(indices, clock) - 1, 0)

    def _during(self, event: Location, clock: int) -> int | None:
        """Operations are not recorded: their passages lie somewhere in the calls of their module.

        The index is the earliest that the next one can have, which is `clock` itself during a call.
        """
        calls = self._calls.get(event.path)
        if not calls:
            return UNKNOWN
        return next((max(entry, clock) for entry, exit_ in calls if exit_ > clock), None)
