"""What the kernel of declared operations goes by: buffers that stay where they are, and where there is room in them."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

KINDS = ("steer", "ablate", "clamp", "replace")
"""By the number that nodes have for them."""

NOTHING = -1


class Sizes(NamedTuple):
    """How much there is room for. `rows` counts tokens of a step, padding included."""

    rows: int
    sites: int
    states: int
    nodes: int
    vectors: int
    width: int

    @classmethod
    def of(cls, rows: int, requests: int, sites: int, width: int) -> Sizes:
        """For so many requests at a time: as many vectors twice over, and 16 operations on each."""
        states = max(2 * requests, 256)
        return cls(rows, max(sites, 1), states, 16 * states, states, width)


class Tables:
    """A row has a state, a state has at each site a first node, and a node is an operation and the one that follows it.

    The kernel reads `slots` (the state of each row), `heads` `[sites, states]`, `nodes` (kind, vector, next) with their
    `numbers` (scale, or limits), and `vectors` in float32. Where nothing is, there is -1.
    """

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes = sizes
        self.slots = torch.full((sizes.rows,), NOTHING, dtype=torch.int32, device=device)
        self.heads = torch.full((sizes.sites, sizes.states), NOTHING, dtype=torch.int32, device=device)
        self.nodes = torch.full((sizes.nodes, 3), NOTHING, dtype=torch.int32, device=device)
        self.numbers = torch.zeros((sizes.nodes, 2), dtype=torch.float32, device=device)
        self.vectors = torch.zeros((sizes.vectors, sizes.width), dtype=torch.float32, device=device)

    @property
    def device(self) -> torch.device:
        return self.slots.device


class Mirror:
    """The tables as the host has them, and what of them has still to be copied to the device.

    Copies go through pinned memory, which torch keeps until the stream has read it: nothing waits.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._vectors: dict[int, torch.Tensor] = {}
        self._changed_nodes: set[int] = set()
        self._changed_states: set[int] = set()
        self._marked = 0
        """Rows that may have a state on the device, counted from the first."""
        self._heads, self._nodes, self._numbers, self._slots = (
            table.cpu().numpy().copy() for table in (tables.heads, tables.nodes, tables.numbers, tables.slots)
        )

    @property
    def width(self) -> int:
        """That of the stream."""
        return self._tables.sizes.width

    def vector(self, number: int, vector: torch.Tensor) -> None:
        self._vectors[number] = vector

    def node(self, number: int, kind: int, vector: int, after: int, low: float, high: float) -> None:
        self._nodes[number] = kind, vector, after
        self._numbers[number] = low, high
        self._changed_nodes.add(number)

    def state(self, number: int, first: Mapping[int, int]) -> None:
        """A state has these first nodes, by site."""
        self._heads[:, number] = NOTHING
        for site, node in first.items():
            self._heads[site, number] = node
        self._changed_states.add(number)

    def upload(self) -> None:
        """Have what has changed copied, in one piece, before the kernels of the step that is about to run."""
        if not self._changed_states:  # there is no vector or node but for a state
            return
        tables, sizes = self._tables, self._tables.sizes
        vectors, nodes, states = self._vectors, [*self._changed_nodes], [*self._changed_states]
        self._vectors, self._changed_nodes, self._changed_states = {}, set(), set()
        index = np.array([*vectors, *nodes, *states], dtype=np.int64)
        rows = [vector.numpy() for vector in vectors.values()]
        found = self._pinned([index, *rows, self._nodes[nodes], self._numbers[nodes], self._heads[:, states]])
        found = found.to(tables.device, non_blocking=True)
        start = 2 * len(index)
        at = found[:start].view(torch.int64).split([len(vectors), len(nodes), len(states)])
        for table, dim, which in (
            (tables.vectors, 0, at[0]),
            (tables.nodes, 0, at[1]),
            (tables.numbers, 0, at[1]),
            (tables.heads, 1, at[2]),
        ):
            shape = (sizes.sites, len(states)) if dim else (len(which), table.shape[1])
            stop = start + shape[0] * shape[1]
            if stop > start:
                table.index_copy_(dim, which, found[start:stop].view(table.dtype).view(shape))
            start = stop

    def mark(self, states: Sequence[int] | NDArray[np.int32]) -> None:
        """Have the first rows be in these states and all others in none; nothing is copied if they are already."""
        rows = max(len(states), self._marked)
        new = np.full(rows, NOTHING, dtype=np.int32)
        new[: len(states)] = states
        self._marked = len(states) if new.max(initial=NOTHING) > NOTHING else 0
        if not np.array_equal(new, self._slots[:rows]):
            self._slots[:rows] = new
            self._tables.slots[:rows].copy_(self._pinned([new]), non_blocking=True)

    @property
    def marked(self) -> bool:
        """Whether any row has a state."""
        return self._marked > 0

    def _pinned(self, content: Sequence[NDArray[Any]]) -> torch.Tensor:
        """All of it, one after the other, as numbers of 32 bits, where the device can read it."""
        joined = np.concatenate([piece.ravel().view(np.int32) for piece in content])
        host = torch.from_numpy(joined)
        return host if self._tables.device.type == "cpu" else host.pin_memory()


class Room:
    """Numbers that are free, the lowest first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size))

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return heapq.heappop(self._free)

    def give(self, number: int) -> None:
        heapq.heappush(self._free, number)
