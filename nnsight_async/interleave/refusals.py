"""What is said of operations that are not there."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nnsight_async.errors import NotComputedError

if TYPE_CHECKING:
    from nnsight_async.interleave.block import BlockRun


def missing(where: str, name: str, names: Sequence[str]) -> str:
    """The message for an operation that a function does not have."""
    near = difflib.get_close_matches(name, names, 3)
    if near:
        return f"{where} has no operation {name!r}; did you mean {' or '.join(near)}?"
    return f"{where} has no operation {name!r}; it has {', '.join(names) or 'none'}"


def unreadable(where: str, reason: object) -> str:
    """The message for a `.source` that has no operations."""
    return f"{where} has no operations: {reason}"


def not_computed(run: BlockRun) -> NotComputedError:
    """What a run is told that waits for something at the end of a step."""
    return NotComputedError(
        f"{run.asked} did not come in step {run.step}: the forward pass ended without it after the last location that "
        "this block had read (it lies before that one, or the model did not come to it in this step)"
    )
