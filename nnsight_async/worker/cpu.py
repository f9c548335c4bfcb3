"""Our worker on the CPU."""

from __future__ import annotations

from typing import Any

import psutil
import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from nnsight_async.worker.worker import BlockWorker

MAX_CACHE = 4 << 30
"""Bytes that the key-value cache takes at most by itself, unless one request needs more."""

REQUESTS = 16
"""Requests of the full length that it has room for, within that."""


class CPUBlockWorker(BlockWorker, CPUWorker):
    """vLLM's CPU worker with blocks."""

    def init_device(self) -> None:
        # Linux wants to be asked before a process uses AMX. vLLM's attention (0.32) uses it in bfloat16 without asking:
        # where no other kernel has asked before, the worker would die of an illegal instruction.
        torch.cpu._init_amx()  # pyright: ignore[reportPrivateUsage]
        super().init_device()


class FrugalCPUBlockWorker(CPUBlockWorker):
    """It, with a key-value cache for a few requests, where vLLM would take nine tenths of the machine's memory."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        vllm_config.cache_config.kv_cache_memory_bytes = MAX_CACHE  # that it is given keeps vLLM from asking for those
        super().__init__(vllm_config, *args, **kwargs)

    def determine_available_memory(self) -> int:
        specs = self.get_kv_cache_spec().values()
        # A block of each layer is never given to a request.
        one = sum(spec.max_memory_usage_bytes(self.vllm_config) + spec.page_size_bytes for spec in specs)
        free = psutil.virtual_memory().available
        length = self.model_config.max_model_len
        if one > free:
            raise ValueError(
                f"the key-value cache of one request of {length} tokens (max_model_len) takes {_gib(one)}, and "
                f"{_gib(free)} of memory are free: set a smaller max_model_len"
            )
        self.cache_config.kv_cache_memory_bytes = cache_bytes(one, free // self.parallel_config.world_size)
        return super().determine_available_memory()


def cache_bytes(one: int, free: int) -> int:
    """Bytes for the cache where a request of full length takes `one`, and half of `free` can be had."""
    return max(min(REQUESTS * one, MAX_CACHE, free // 2), one)


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
