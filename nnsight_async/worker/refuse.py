"""What an engine with blocks does not support, refused when the worker boots."""

from __future__ import annotations

from typing import Any

from nnsight_async.errors import UnsupportedError


def refuse(config: Any) -> None:
    """Raise `UnsupportedError` for a vLLM config under which blocks would see wrong or partial values."""
    parallel = config.parallel_config
    reasons = {
        "speculative decoding": config.speculative_config is not None,
        "dual batch overlap (enable_dbo)": bool(getattr(parallel, "enable_dbo", False)),
        "decode context parallelism": getattr(parallel, "decode_context_parallel_size", 1) > 1,
        "prefill context parallelism": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        "pooling models": config.model_config.runner_type == "pooling",
        "pipeline parallelism (not yet)": parallel.pipeline_parallel_size > 1,
    }
    found = [name for name, asked in reasons.items() if asked]
    if found:
        raise UnsupportedError(f"{', '.join(found)} cannot be combined with blocks; build the engine without")
