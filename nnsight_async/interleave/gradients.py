"""Gradients in a block: taken where the forward pass records a graph, and refused where it does not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from nnsight_async.errors import UnsupportedError
from nnsight_async.interleave.context import running

ON_VLLM = "vLLM computes without them; TransformersModel runs the same block with them"
SWITCHED_OFF = (
    "this run computes without them, because nothing in the text of its block takes any: give the trace gradients=True"
)
NOT_KEPT = (
    "this tensor was computed in the block, and PyTorch keeps no gradient of it: call .retain_grad() on it before "
    "backward(), or take the .grad of the value that was read"
)


def gradient(value: Any, name: str) -> Any:
    """What `EXPR.grad` and `EXPR.backward` in a block become: refused for a value that no gradient can reach.

    What `EXPR.backward(...)` returns can be entered, as in `with loss.backward():`.
    """
    if not isinstance(value, torch.Tensor):
        return getattr(value, name)
    if _is_out_of_reach(value):
        context = running()
        if context is None or not context.differentiable:
            off = context is not None and context.differentiable is False
            raise UnsupportedError(f".{name} needs gradients, and {SWITCHED_OFF if off else ON_VLLM}")
    if name == "backward":
        return _entered(value.backward)
    if value.requires_grad and not value.is_leaf and not value.retains_grad:
        raise UnsupportedError(NOT_KEPT)
    return value.grad


def _entered(backward: Callable[..., None]) -> Callable[..., AbstractContextManager[None]]:
    def call(*args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        backward(*args, **kwargs)
        return nullcontext()

    return call


def _is_out_of_reach(value: torch.Tensor) -> bool:
    return value.is_inference() or not (value.requires_grad or (value.is_leaf and value.grad is not None))
