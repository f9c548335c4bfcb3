"""What is refused when a worker boots, and what is said of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nnsight_async import UnsupportedError
from nnsight_async.worker.refuse import refuse


def config(**parallel: Any) -> SimpleNamespace:
    given = {
        "data_parallel_size": 1,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "nnodes": 1,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{**given, **parallel}),
        speculative_config=None,
        model_config=SimpleNamespace(runner_type="generate"),
        device_config=SimpleNamespace(device_type="cpu"),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        lora_config=None,
    )


def test_stages_on_the_cpu_are_served():
    refuse(config())


@pytest.mark.parametrize(
    ("parallel", "reason"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"distributed_executor_backend": "ray"}, "distributed_executor_backend='ray'"),
        ({"nnodes": 2}, "several nodes"),
    ],
)
def test_what_stages_cannot_be_combined_with_is_named(parallel, reason):
    with pytest.raises(UnsupportedError, match=f"pipeline parallelism cannot be combined with {reason} yet"):
        refuse(config(**parallel))
    refuse(config(**{**parallel, "pipeline_parallel_size": 1}))


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("lora_config", object(), "enable_lora"),
        ("device_config", SimpleNamespace(device_type="cuda"), "CUDA, or any device but the CPU"),
        ("scheduler_config", SimpleNamespace(async_scheduling=True), "asynchronous scheduling"),
    ],
)
def test_so_are_settings_of_other_kinds(name, value, reason):
    asked = config()
    setattr(asked, name, value)
    with pytest.raises(UnsupportedError, match=f"cannot be combined with {reason} yet"):
        refuse(asked)
    asked.parallel_config.pipeline_parallel_size = 1
    refuse(asked)
