from __future__ import annotations

import os

import pytest

# Before anything imports torch or vLLM, which read these once. `setdefault`: a developer's own choice wins.
for name, value in {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}.items():
    os.environ.setdefault(name, value)

from nnsight_async.testing import tiny_checkpoint


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
