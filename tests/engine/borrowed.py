"""Other arguments for a model on an engine that runs already."""

from __future__ import annotations

from typing import Any

from nnsight_async import VLLM


def borrowed(model: VLLM, **given: Any) -> VLLM:
    """A model with `given` on the engine of `model`, which it must not close."""
    other: Any = VLLM(model.repo, mode="async", **given)
    other._engine, other._root = model._engine, model.tree
    return other
