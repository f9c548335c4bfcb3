"""Which operations of a request act at which positions of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nnsight_async.runs.ops import Positions

    Mask = NDArray[np.bool_]

MOST = 62
"""How many different choices of positions one request may have: each is a bit of a number."""


def mask(where: Positions, prompt: int, total: int) -> Mask:
    """At which of the `total` positions that a request can come to it acts; `ValueError` for one that there is not."""
    found = np.zeros(total, dtype=np.bool_)
    if where is None:
        found[:] = True
    elif where == "prompt":
        found[:prompt] = True
    elif where == "generated":
        found[prompt:] = True
    elif where[0] == "slice":
        _, start, stop, step = where
        found[_from_the_end(start, prompt) : _from_the_end(stop, prompt) : step] = True  # type: ignore[misc]
    else:
        for position in where:
            found[_index(position, prompt, total)] = True  # type: ignore[arg-type]
    return found


def groups(wheres: Sequence[Positions], prompt: int, total: int) -> tuple[list[list[int]], NDArray[np.intp]]:
    """The sets of operations that act together, by their numbers, and which of the sets acts at each position.

    The last goes for all positions after it, too.
    """
    different = list(dict.fromkeys(wheres))
    if different == [None]:
        return [list(range(len(wheres)))], np.zeros(1, dtype=np.intp)
    if len(different) > MOST:
        raise ValueError(f"operations with {len(different)} different choices of positions: at most {MOST} can be made")
    codes = np.zeros(total, dtype=np.int64)
    for bit, where in enumerate(different):
        codes |= mask(where, prompt, total).astype(np.int64) << bit
    bits = [different.index(where) for where in wheres]
    found, which = np.unique(codes, return_inverse=True)
    return [[number for number, bit in enumerate(bits) if int(code) >> bit & 1] for code in found], which


def _from_the_end(bound: int | None, prompt: int) -> int | None:
    """A bound of a slice, which is cut where there are no positions."""
    return bound if bound is None or bound >= 0 else max(prompt + bound, 0)


def _index(position: int, prompt: int, total: int) -> int:
    index = position if position >= 0 else prompt + position
    if not 0 <= index < total:
        raise ValueError(
            f"position {position} does not exist: the prompt has {prompt} tokens, and the last position that can be is "
            f"{total - 1}"
        )
    return index
