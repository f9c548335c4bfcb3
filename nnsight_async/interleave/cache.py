"""Collecting many locations in every step, without a read per line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch

from nnsight_async.interleave.locations import Location


class Cache(dict[str, list[Any]]):
    """Values by location (`"model.layers.0.output"`), one per passage, in order; grows from step to step.

    What is stored is what the block left at the location. Arguments that are neither tensors nor plain values are
    stored as None.
    """

    def __init__(self, events: Iterable[Location]) -> None:
        super().__init__()
        self.events = tuple(events)

    def store(self, event: Location, value: Any) -> None:
        """Add what passed at `event`."""
        key = f"{event.path}.{event.kind}"
        self.setdefault(key, []).append(_storable(value))

    def counts(self) -> dict[str, int]:
        """How many values each location has now."""
        return {key: len(values) for key, values in self.items()}

    def since(self, counts: Mapping[str, int]) -> dict[str, list[Any]]:
        """What was added since `counts`."""
        added = {key: values[counts.get(key, 0) :] for key, values in self.items()}
        return {key: values for key, values in added.items() if values}


def _storable(value: Any) -> Any:
    if value is None or isinstance(value, (torch.Tensor, bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(_storable(item) for item in cast("list[Any]", value))
    if isinstance(value, Mapping):
        return {key: _storable(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    return None
