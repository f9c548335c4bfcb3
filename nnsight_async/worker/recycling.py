"""Blocks of the key-value cache that change hands after a block of ours has edited what is in them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

    from nnsight_async.interleave.block import BlockRun


class Recycling:
    """Clears what an edited run has left in the key-value cache before another request is given it.

    vLLM hands freed blocks on as they are (0.32, 0.33). Attention weighs the rows past a request's end with zero, and
    zero times a NaN that an edit has made is NaN: without this, one request's edit would reach the next one's values.
    """

    def __init__(self, model: torch.nn.Module, blocks: int, block_size: int) -> None:
        self._caches = list(_caches(model, blocks))
        self._block_size = block_size
        self._held: dict[str, list[int]] = {}
        self._edited: set[int] = set()

    def hand_over(
        self, scheduled: SchedulerOutput, runs: Mapping[str, Sequence[BlockRun]], tainting: Collection[str] = ()
    ) -> None:
        """Look at the blocks that a step gives out, before its forward pass; `runs` are those that are still known.

        What the requests `tainting` are given counts as edited from the beginning.
        """
        if not runs and not self._edited and not tainting:
            return
        for request, blocks in runs.items():
            for run in blocks:  # a generator would take three times as long
                if run.wrote:
                    self._edited.update(self._held.pop(request, ()))
        given = list(self._given(scheduled))
        if self._edited:
            self._clear(self._edited.intersection(block for _, blocks in given for block in blocks))
        for request, blocks in given:
            if request in tainting:
                self._edited.update(blocks)
            if request in runs:
                self._held.setdefault(request, []).extend(blocks)

    def arrive(self, request: NewRequestData) -> None:
        """A run with a block has come with this step."""
        self._held[request.req_id] = self._unread(request.block_ids, request.num_computed_tokens)

    def taint(self, request: NewRequestData) -> None:
        """A request has come whose operations may leave anything in what it has been given."""
        self._edited.update(self._unread(request.block_ids, request.num_computed_tokens))

    def part(self, request: str, runs: Sequence[BlockRun]) -> None:
        """A request has ended; what its blocks have edited stays marked until it is handed on."""
        held = self._held.pop(request, ())
        if any(run.wrote for run in runs):
            self._edited.update(held)

    def _given(self, scheduled: SchedulerOutput) -> Iterator[tuple[str, list[int]]]:
        """Blocks that requests are given in this step, without those whose contents they are to read."""
        for request in scheduled.scheduled_new_reqs:
            yield request.req_id, self._unread(request.block_ids, request.num_computed_tokens)
        cached = scheduled.scheduled_cached_reqs
        for index, blocks in enumerate(cached.new_block_ids):
            if blocks is not None:
                name = cached.req_ids[index]
                read = cached.num_computed_tokens[index] if name in cached.resumed_req_ids else 0
                yield name, self._unread(blocks, read)

    def _unread(self, groups: Sequence[Sequence[int]], computed: int) -> list[int]:
        first = -(-computed // self._block_size)
        return [block for group in groups for block in group[first:]]

    def _clear(self, blocks: set[int]) -> None:
        if not blocks:
            return
        self._edited -= blocks
        with torch.inference_mode():
            for cache, parts in self._caches:
                rows = [block * parts + part for block in blocks for part in range(parts)]
                cache.index_fill_(0, _on(cache.device, rows), 0)


def _on(device: torch.device, rows: list[int]) -> torch.Tensor:
    """Indices on the device, without waiting for what it is at."""
    return torch.tensor(rows, pin_memory=device.type != "cpu").to(device, non_blocking=True)


def _caches(model: torch.nn.Module, blocks: int) -> Iterable[tuple[torch.Tensor, int]]:
    """The cache of each attention layer once, blocks first, and into how many rows of it the kernel splits a block."""
    seen: set[int] = set()
    for module in model.modules():
        cache: Any = getattr(module, "kv_cache", None)
        if isinstance(cache, torch.Tensor) and cache.numel() and cache.data_ptr() not in seen:
            seen.add(cache.data_ptr())
            at = next(at for at in range(cache.ndim) if cache.shape[at] and cache.shape[at] % blocks == 0)
            yield cache.movedim(at, 0), cache.shape[at] // blocks
