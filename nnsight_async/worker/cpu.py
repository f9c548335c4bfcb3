"""Our worker on the CPU."""

from __future__ import annotations

from typing import Any

import psutil
import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from nnsight_async.worker.cache_size import MAX_BYTES, cache_bytes
from nnsight_async.worker.cpu_lora import leave_the_rest_alone
from nnsight_async.worker.worker import BlockWorker


class CPUBlockWorker(BlockWorker, CPUWorker):
    """vLLM's CPU worker with blocks."""

    def init_device(self) -> None:
        # Linux wants to be asked before a process uses AMX. vLLM's attention (0.32) uses it in bfloat16 without asking:
        # where no other kernel has asked before, the worker would die of an illegal instruction.
        torch.cpu._init_amx()  # pyright: ignore[reportPrivateUsage]
        if self.vllm_config.lora_config is not None:
            leave_the_rest_alone()
        super().init_device()


class FrugalCPUBlockWorker(CPUBlockWorker):
    """It, with a key-value cache for a few requests, where vLLM would take nine tenths of the machine's memory."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        vllm_config.cache_config.kv_cache_memory_bytes = MAX_BYTES  # that it is given keeps vLLM from asking for those
        super().__init__(vllm_config, *args, **kwargs)

    def determine_available_memory(self) -> int:
        specs = self.get_kv_cache_spec().values()
        # A block of each layer is never given to a request.
        one = sum(spec.max_memory_usage_bytes(self.vllm_config) + spec.page_size_bytes for spec in specs)
        free = psutil.virtual_memory().available // self.parallel_config.world_size
        length: int = self.model_config.max_model_len
        if self.model_config.original_max_model_len == -1:  # vLLM then takes the length that fits the cache
            one = min(one, MAX_BYTES, free // 2)
        self.cache_config.kv_cache_memory_bytes = cache_bytes(one, free, length)
        return super().determine_available_memory()
