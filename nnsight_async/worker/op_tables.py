"""What the kernel of declared operations goes by: buffers that stay where they are, and where there is room in them."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

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
        self._fresh: dict[int, torch.Tensor] = {}
        self._stale = False
        self._marked = 0
        """Rows that may have a state on the device, counted from the first."""
        self._heads, self._nodes, self._numbers = tables.heads.cpu(), tables.nodes.cpu(), tables.numbers.cpu()
        self._views = self._heads.numpy(), self._nodes.numpy(), self._numbers.numpy()
        self._slots = torch.full_like(tables.slots, NOTHING, device="cpu")

    @property
    def width(self) -> int:
        """That of the stream."""
        return self._tables.sizes.width

    def vector(self, number: int, vector: torch.Tensor) -> None:
        self._fresh[number] = vector

    def node(self, number: int, kind: int, vector: int, after: int, low: float, high: float) -> None:
        _, nodes, numbers = self._views
        nodes[number] = kind, vector, after
        numbers[number] = low, high
        self._stale = True

    def state(self, number: int, first: Mapping[int, int]) -> None:
        """A state has these first nodes, by site."""
        heads, _, _ = self._views
        heads[:, number] = NOTHING
        for site, node in first.items():
            heads[site, number] = node
        self._stale = True

    def upload(self) -> None:
        """Have what has changed copied, before the kernels of the step that is about to run."""
        tables = self._tables
        if self._fresh:
            numbers, self._fresh = self._fresh, {}
            at = self._on_device(torch.tensor(list(numbers)))
            tables.vectors.index_copy_(0, at, self._on_device(torch.stack(list(numbers.values()))))
        stale, self._stale = self._stale, False
        if stale and tables.device.type != "cpu":  # where the tables are those of the host
            for table, here in ((tables.heads, self._heads), (tables.nodes, self._nodes)):
                table.copy_(self._pinned(here), non_blocking=True)
            tables.numbers.copy_(self._pinned(self._numbers), non_blocking=True)

    def mark(self, states: Sequence[int]) -> None:
        """Have the first rows be in these states and all others in none; nothing is copied if they are already."""
        rows = max(len(states), self._marked)
        new = torch.tensor([*states, *[NOTHING] * (rows - len(states))], dtype=torch.int32)
        self._marked = len(states) if max(states, default=NOTHING) > NOTHING else 0
        if not torch.equal(new, self._slots[:rows]):
            self._slots[:rows] = new
            self._tables.slots[:rows].copy_(self._pinned(new), non_blocking=True)

    @property
    def marked(self) -> bool:
        """Whether any row has a state."""
        return self._marked > 0

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._tables.device.type == "cpu" else tensor.pin_memory()

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._pinned(tensor).to(self._tables.device, non_blocking=True)


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
