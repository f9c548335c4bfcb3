from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

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

RENAMED = {"model.layers": "blocks", "self_attn": "attention"}
BLOCK_TIMEOUT = 5.0  # seconds


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
    from nnsight_async.testing.engine import tiny_engine_args

    engine = VLLM(llama, mode="async", dispatch=True, rename=RENAMED, block_timeout=BLOCK_TIMEOUT, **tiny_engine_args())
    yield engine
    engine.close()


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
