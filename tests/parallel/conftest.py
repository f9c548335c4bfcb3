"""Engines whose model is divided among processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from nnsight_async import VLLM
from nnsight_async.testing import hf_model, tiny_checkpoint
from nnsight_async.testing.engine import tiny_engine_args
from tests.conftest import BLOCK_TIMEOUT

RANKS = 2


@contextmanager
def divided(checkpoint: str, **more: Any) -> Iterator[VLLM]:
    """An engine on two ranks, each with a core of its own."""
    before = os.environ.get("VLLM_CPU_OMP_THREADS_BIND")
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    args = {**tiny_engine_args(), "distributed_executor_backend": "mp", "tensor_parallel_size": RANKS, **more}
    try:
        engine = VLLM(checkpoint, mode="async", dispatch=True, block_timeout=BLOCK_TIMEOUT, **args)
    finally:
        if before is None:
            del os.environ["VLLM_CPU_OMP_THREADS_BIND"]
        else:
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = before
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="session")
def two() -> Iterator[VLLM]:
    """The tiny Llama on two ranks."""
    with divided(tiny_checkpoint("llama")) as engine:
        yield engine


@pytest.fixture(scope="session")
def staged() -> Iterator[VLLM]:
    """The tiny Llama on two stages of a pipeline."""
    with divided(tiny_checkpoint("llama"), tensor_parallel_size=1, pipeline_parallel_size=RANKS) as engine:
        yield engine


@pytest.fixture(scope="session")
def one(model: VLLM) -> VLLM:
    """The same on one."""
    return model


@pytest.fixture(scope="session")
def hf() -> Any:
    return hf_model("llama")
