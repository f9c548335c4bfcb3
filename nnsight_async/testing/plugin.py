"""A pytest plugin for suites of applications: `pytest_plugins = ["nnsight_async.testing.plugin"]` in `conftest.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nnsight_async.testing.checkpoints import tiny_checkpoint
from nnsight_async.testing.engine import tiny_engine_args
from nnsight_async.vllm import VLLM


@pytest.fixture(scope="session")
def tiny_llama() -> str:
    """The folder of a tiny Llama of random weights, with a tokenizer; made once and kept in the user's cache."""
    return tiny_checkpoint("llama")


@pytest.fixture(scope="session")
def tiny_model(tiny_llama: str) -> Iterator[VLLM]:
    """One engine of mode "async" on `tiny_llama`, for all tests.

    It is tied to no event loop, so tests with loops of any scope can share it, and so can those without a loop, with
    plain `with`.
    """
    model = VLLM(tiny_llama, mode="async", dispatch=True, **tiny_engine_args())
    yield model
    model.close()
