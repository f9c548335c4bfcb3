"""Engine arguments with which a tiny checkpoint starts fast and computes exactly."""

from __future__ import annotations

from typing import Any


def tiny_engine_args() -> dict[str, Any]:
    """Arguments for `VLLM(tiny_checkpoint(...), **tiny_engine_args())`: float32, a small cache, the worker in the
    engine's own process."""
    return {
        "dtype": "float32",
        "max_model_len": 256,
        "kv_cache_memory_bytes": 64 << 20,
        "distributed_executor_backend": "uni",
    }
