"""What is said of operations that are not there."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def missing(where: str, name: str, names: Sequence[str]) -> str:
    """The message for an operation that a function does not have."""
    near = difflib.get_close_matches(name, names, 3)
    if near:
        return f"{where} has no operation {name!r}; did you mean {' or '.join(near)}?"
    return f"{where} has no operation {name!r}; it has {', '.join(names) or 'none'}"


def unreadable(where: str, reason: object) -> str:
    """The message for a `.source` that has no operations."""
    return f"{where} has no operations: {reason}"
