"""Gradients in a block, which the engine's forward passes do not record."""

from __future__ import annotations

from typing import Any

import torch

from nnsight_async.errors import UnsupportedError


def gradient(value: Any, name: str) -> Any:
    """What `EXPR.grad` and `EXPR.backward` in a block become: refused for a value that no gradient can reach."""
    if isinstance(value, torch.Tensor) and _is_out_of_reach(value):
        raise UnsupportedError(
            f".{name} needs gradients, and vLLM computes without them; TransformersModel runs the same block with them"
        )
    return getattr(value, name)


def _is_out_of_reach(value: torch.Tensor) -> bool:
    return value.is_inference() or not (value.requires_grad or (value.is_leaf and value.grad is not None))
