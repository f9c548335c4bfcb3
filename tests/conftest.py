from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from nnsight_async import VLLM, TransformersModel

# Before anything imports torch or vLLM, which read these once. `setdefault`: a developer's own choice wins.
for name, value in {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # what has `distributed_executor_backend="uni"` be heard on a CPU
}.items():
    os.environ.setdefault(name, value)

from nnsight_async.testing import tiny_checkpoint
from nnsight_async.testing.engine import tiny_engine_args

RENAMED = {"model.layers": "blocks", "self_attn": "attention"}
BLOCK_TIMEOUT = 5.0  # seconds
LONG: dict[str, Any] = {"max_tokens": 4000, "temperature": 0.0, "ignore_eos": True}
"""A run of many seconds, which has not ended by itself when a caller leaves it, however slow the caller is."""


def engine_args_for_long() -> dict[str, Any]:
    """Arguments of an engine that takes it."""
    return {**tiny_engine_args(), "max_model_len": 4096, "hf_overrides": {"max_position_embeddings": 4096}}


@pytest.fixture(scope="session")
def llama() -> str:
    return tiny_checkpoint("llama")


@pytest.fixture(scope="session")
def qwen3() -> str:
    return tiny_checkpoint("qwen3")


@pytest.fixture(scope="session")
def gpt2() -> str:
    return tiny_checkpoint("gpt2")


@pytest.fixture(scope="session")
def qwen3_moe() -> str:
    return tiny_checkpoint("qwen3_moe")


@pytest.fixture(scope="session")
def vllm_model(llama: str) -> Iterator[VLLM]:
    """The tiny Llama on an engine that all tests share; of mode "async", it also serves `with` where no loop runs."""
    from nnsight_async import VLLM

    args = engine_args_for_long()
    engine = VLLM(llama, mode="async", dispatch=True, rename=RENAMED, block_timeout=BLOCK_TIMEOUT, **args)
    yield engine
    engine.close()


@pytest.fixture
def unhurried(vllm_model: VLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of this test may take their time on that engine, because they wait for the test."""
    engine: Any = vllm_model._engine
    monkeypatch.setattr(engine, "_limits", replace(engine._limits, block_seconds=120.0))


@pytest.fixture(scope="session")
def transformers_model(llama: str) -> Iterator[TransformersModel]:
    """The tiny Llama in this process; of mode "async", it also serves `with` where no loop runs."""
    from nnsight_async import TransformersModel

    local = TransformersModel(llama, mode="async", rename=RENAMED)
    local._build()
    yield local
    local.close()


@pytest.fixture(scope="session")
def model(vllm_model: VLLM) -> VLLM:
    return vllm_model
