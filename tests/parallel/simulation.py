"""The simulated engine on several ranks, each a thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from nnsight_async.interleave.following import Following
from nnsight_async.interleave.leading import Leading
from nnsight_async.tree.record import record
from nnsight_async.worker.blocks import Blocks, Edit
from nnsight_async.worker.following import FollowingBlocks
from nnsight_async.worker.layouts import Observed
from nnsight_async.worker.outbox import NoOutbox
from tests.parallel.threads import ThreadRanks, divided
from tests.worker.causal import KV_HEADS, Causal, Part
from tests.worker.simulation import Simulation


class Rank(Simulation):
    """What one rank has of the simulated engine."""

    def __init__(self, ranks: ThreadRanks, model: Causal) -> None:
        self.ranks = ranks
        self.model = model
        super().__init__()

    def build(self) -> None:
        observed = Observed(self.model, KV_HEADS, self.ranks.size)
        calls = record(self.model, self._dummy, observed)
        self.layouts = observed.layouts(self.ranks.compare)
        if self.ranks.rank == 0:
            leading = partial(Leading, ranks=self.ranks, layouts=self.layouts, device=torch.device("cpu"))
            self.blocks = self.blocks_for(calls, leading)
        else:
            self.letters = NoOutbox("", torch.device("cpu"))  # type: ignore[assignment]
            following = partial(Following, ranks=self.ranks, layouts=self.layouts)
            self.blocks = self.blocks_for(calls, following, FollowingBlocks)


class Together(Rank):
    """The first rank, which has the others do what it does."""

    def __init__(self, size: int = 2) -> None:
        mine, *others = ThreadRanks.group(size)
        self._threads = [ThreadPoolExecutor(1) for _ in others]
        models = [divided(Causal(), ranks) for ranks in (mine, *others)]  # here: threads share torch's random numbers
        building = [
            thread.submit(Rank, ranks, model)
            for thread, ranks, model in zip(self._threads, others, models[1:], strict=True)
        ]
        super().__init__(mine, models[0])
        self.others = [rank.result() for rank in building]
        self.install = self.blocks.install
        self.blocks.install = self._install  # type: ignore[method-assign]

    def drop(self, request: str) -> None:
        self._all(lambda rank: Simulation.drop(rank, request))

    def schedule(self, scheduled: Any) -> None:
        self._all(lambda rank: Simulation.schedule(rank, scheduled))

    def forward(self, parts: list[Part], ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        samples, *others = self._all(lambda rank: Simulation.forward(rank, parts, ids, positions))
        assert all(torch.equal(samples, other) for other in others)
        return samples

    def clear(self, numbers: list[int]) -> int:
        """End edits; returns how often the first rank had spoken by then."""
        self._all(lambda rank: rank.blocks.clear(numbers))
        return self.blocks.interleaver.exchanges

    def _install(self, number: int, edit: Edit, timeout: float) -> None:
        self.install(number, edit, timeout)
        for rank in self.others:
            rank.blocks.install(number, edit, timeout)

    def _all(self, work: Callable[[Simulation], Any]) -> list[Any]:
        running = [thread.submit(work, rank) for thread, rank in zip(self._threads, self.others, strict=True)]
        return [work(self), *[each.result() for each in running]]

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()

    @property
    def every_blocks(self) -> list[Blocks]:
        return [self.blocks, *[rank.blocks for rank in self.others]]
