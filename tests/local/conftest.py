"""Tiny models of transformers, one load each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from nnsight_async import TransformersModel
from nnsight_async.testing import hf_model, tiny_checkpoint

ARCHITECTURES = ("llama", "gpt2", "qwen3")


@dataclass
class Pair:
    """One architecture as a model that takes blocks, and in transformers."""

    model: Any
    hf: Any

    @property
    def layers(self) -> Any:
        return self.model.transformer.h if hasattr(self.hf, "transformer") else self.model.model.layers

    @property
    def hf_layers(self) -> Any:
        return self.hf.transformer.h if hasattr(self.hf, "transformer") else self.hf.model.layers


@pytest.fixture(scope="session", params=ARCHITECTURES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with TransformersModel(tiny_checkpoint(request.param), dispatch=True) as model:
        yield Pair(model, hf_model(request.param))


@pytest.fixture(scope="session")
def model(transformers_model: Any) -> Any:
    return transformers_model


@pytest.fixture(scope="session")
def hf() -> Any:
    return hf_model("llama")
