"""Where blocks may look on an engine that replays graphs."""

from __future__ import annotations

from collections.abc import Iterable

from nnsight_async.errors import NotATapError
from nnsight_async.interleave.locations import Location
from nnsight_async.interleave.order import Order

SHOWN = 6


class Taps:
    """The locations in the forward pass that were declared, and all those that come after it."""

    def __init__(self, events: Iterable[Location], order: Order) -> None:
        self.events = tuple(events)
        self._known = set(self.events)
        self._order = order

    def has(self, event: Location) -> bool:
        """Whether blocks may look at `event`."""
        return event in self._known or self._order.late(event)

    def check(self, event: Location) -> None:
        """Raise `NotATapError` for a place at which the graphs do not stop."""
        if not self.has(event):
            shown = ", ".join(map(str, self.events[:SHOWN])) + ", ..." * (len(self.events) > SHOWN)
            raise NotATapError(
                f"{event} is not one of the taps of this engine ({shown}), and its graphs do not stop there; add it to "
                "`taps=` where the model is built"
            )
