"""Engine arguments with which a tiny checkpoint starts fast and computes exactly."""

from __future__ import annotations

import asyncio
from typing import Any

DRAINED_WITHIN = 60.0  # seconds
HELD = ("client_runs", "client_tasks", "runs", "waiting", "entered", "watched")


def tiny_engine_args() -> dict[str, Any]:
    """Arguments for `VLLM(tiny_checkpoint(...), **tiny_engine_args())`: float32, a small cache, the worker in the
    engine's own process (on a CPU only with `quiet_environment()`, as vLLM gives it one of its own there)."""
    return {
        "dtype": "float32",
        "max_model_len": 256,
        "kv_cache_memory_bytes": 64 << 20,
        "distributed_executor_backend": "uni",
    }


async def drained(model: Any) -> dict[str, Any]:
    """Wait until neither this process nor the worker holds anything of a run; `TimeoutError` if something stays."""
    counts: dict[str, Any] = {}
    try:
        async with asyncio.timeout(DRAINED_WITHIN):
            while not counts or any(counts[name] for name in HELD):
                counts = await model.stats()
    except TimeoutError:
        raise TimeoutError(f"runs have left something behind: {counts}") from None
    return counts
