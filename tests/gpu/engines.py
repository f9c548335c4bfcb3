"""Engines of tiny models on a CUDA device."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from nnsight_async import VLLM

TAPS = [
    "model.layers[*].output",
    "model.layers[*].input",
    "model.layers[1].mlp.output",
    "model.layers[0].self_attn.output",
    "model.layers[0].self_attn.*",
]
ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 32,
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 256 << 20,
    "attention_backend": "TRITON_ATTN",  # the only one for float32
}
GRAPHS = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}}
UNCOMPILED = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4], "cudagraph_mode": "FULL", "mode": 0}}


@contextmanager
def engine(repo: str, **arguments: Any) -> Generator[VLLM]:
    """A model on an engine of its own."""
    model = VLLM(repo, mode="async", dispatch=True, **ARGUMENTS, **arguments)
    try:
        yield model
    finally:
        model.close()
