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
    }
    found = [name for name, asked in reasons.items() if asked]
    if found:
        raise UnsupportedError(f"{', '.join(found)} cannot be combined with blocks; build the engine without")
    if parallel.pipeline_parallel_size > 1:
        _refuse_in_pipelines(config)


def _refuse_in_pipelines(config: Any) -> None:
    parallel = config.parallel_config
    reasons = {
        "CUDA, or any device but the CPU": config.device_config.device_type != "cpu",
        "tensor_parallel_size": parallel.tensor_parallel_size > 1,
        "enable_lora": config.lora_config is not None,
        "asynchronous scheduling": bool(config.scheduler_config.async_scheduling),
        f"distributed_executor_backend={parallel.distributed_executor_backend!r}":
        parallel.distributed_executor_backend != "mp",
        "several nodes": getattr(parallel, "nnodes", 1) > 1,
    }  # fmt: skip
    found = [name for name, asked in reasons.items() if asked]
    if found:
        raise UnsupportedError(f"pipeline parallelism cannot be combined with {', '.join(found)} yet, where blocks run")
