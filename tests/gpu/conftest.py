"""The tiny Qwen3 on a CUDA device: every module called, with graphs per step, and with taps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.gpu.engines import GRAPHS, TAPS, engine

if TYPE_CHECKING:
    from nnsight_async import VLLM


@pytest.fixture(scope="session")
def eager(qwen3: str) -> Iterator[VLLM]:
    with engine(qwen3) as model:
        yield model


@pytest.fixture(scope="session")
def stepwise(qwen3: str) -> Iterator[VLLM]:
    with engine(qwen3, enforce_eager=False, **GRAPHS) as model:
        yield model


@pytest.fixture(scope="session")
def tapped(qwen3: str) -> Iterator[VLLM]:
    with engine(qwen3, taps=TAPS, **GRAPHS) as model:
        yield model
