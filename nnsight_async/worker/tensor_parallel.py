"""What is made of another kind where several ranks share a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group

from nnsight_async.interleave.following import Following
from nnsight_async.interleave.interleaver import Interleaver
from nnsight_async.interleave.leading import Leading
from nnsight_async.worker.layouts import Observed
from nnsight_async.worker.ranks import GroupRanks


class TensorParallel:
    """The group of this worker. `observed` is to be shown a forward pass before `interleaver` is called."""

    def __init__(self, ranks: GroupRanks | None, observed: Observed | None, device: torch.device) -> None:
        self._ranks = ranks
        self.observed = observed
        self._device = device

    @classmethod
    def of(cls, runner: Any) -> TensorParallel:
        """That of the worker which has this runner."""
        group: Any = get_tp_group()
        if group.world_size == 1:
            return cls(None, None, runner.device)
        ranks = GroupRanks(group, runner.device)
        kv_heads = runner.model_config.get_total_num_kv_heads()
        return cls(ranks, Observed(runner.model, kv_heads, ranks.size), runner.device)

    @property
    def leads(self) -> bool:
        """Whether blocks run on this rank."""
        return self._ranks is None or self._ranks.rank == 0

    def interleaver(self, *args: Any) -> Interleaver:
        """The interleaver of this rank, of the arguments that one has."""
        if self._ranks is None or self.observed is None:
            return Interleaver(*args)
        layouts = self.observed.layouts(self._ranks.compare)
        if self.leads:
            return Leading(*args, ranks=self._ranks, layouts=layouts, device=self._device)
        return Following(*args, ranks=self._ranks, layouts=layouts)

    def agree(self, failure: str | None) -> Sequence[str | None]:
        """What went wrong on each rank, given what did on this one."""
        return [failure] if self._ranks is None else self._ranks.agree(failure)
