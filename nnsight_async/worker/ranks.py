"""The tensor-parallel group of this worker, as blocks use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from nnsight_async.errors import UnsupportedError
from nnsight_async.interleave.ranks import Kind

COLLECTIVES = ("all_reduce", "all_gather", "all_gatherv", "reduce_scatter", "reduce_scatterv", "gather", "broadcast",
               "_all_reduce_out_place", "_all_gather_out_place", "_reduce_scatter_out_place")  # fmt: skip
"""Methods of vLLM's groups (0.32, 0.33) that wait for all ranks."""


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise UnsupportedError(
        "a block runs on one rank alone, and what it calls here waits for all: apply a module of the model, which all "
        "ranks then do, or a method of one, taken from the model in the block"
    )


class GroupRanks:
    """Messages go through vLLM's queue in shared memory, tensors through its device group (vLLM 0.32, 0.33)."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.rank: int = group.rank_in_group
        self.size: int = group.world_size
        self._group = group
        self._refusing = dict.fromkeys((name for name in COLLECTIVES if hasattr(group, name)), _refuse)
        self._device = device

    def tell(self, message: object) -> None:
        self._group.broadcast_object(message)

    def hear(self) -> Any:
        return self._group.broadcast_object(None)

    def send(self, tensor: torch.Tensor) -> None:
        self._broadcast(tensor.detach().to(self._device).contiguous())

    def receive(self, kind: Kind) -> torch.Tensor:
        return self._broadcast(torch.empty(kind.shape, dtype=kind.dtype, device=self._device))

    def part(self) -> None:
        vars(self._group).update(self._refusing)

    def meet(self) -> None:
        for name in self._refusing:
            vars(self._group).pop(name, None)

    def gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(tensor, parts, dst=self._group.ranks[0], group=self._group.device_group)
        return parts or ()

    def agree(self, failure: str | None) -> Sequence[str | None]:
        failures: list[str | None] = [None] * self.size
        dist.all_gather_object(failures, failure, group=self._group.cpu_group)
        return failures

    def compare(self, found: Any) -> list[Any]:
        """What each rank has found."""
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, found, group=self._group.cpu_group)
        return every

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel():
            dist.broadcast(tensor, src=self._group.ranks[0], group=self._group.device_group)
        return tensor
