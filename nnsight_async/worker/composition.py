"""What a runner adapter tells about a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Composition:
    """Which rows of the step belong to which request, in the runner's order.

    Request `i` has the rows `[starts[i], starts[i + 1])`, the first of which is its token at position `computed[i]`;
    `rows` counts the padding too, where that is known (`Blocks.pad`).
    """

    requests: Sequence[str]
    starts: Sequence[int]
    computed: Sequence[int]
    rows: int


def numbers(found: Any, count: int) -> Sequence[int]:
    """The first `count` of what a composition has, as Python's."""
    return found[:count].tolist() if isinstance(found, np.ndarray) else found[:count]


NOBODY = Composition((), (), (), 0)
"""What is told of a step in which no request has a block."""
