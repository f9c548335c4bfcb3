"""The same block on two engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nnsight_async import VLLM

PROMPT = [5, 6, 7, 8, 9]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
Probe = Callable[[Any, Any], None]


def values(model: VLLM, probe: Probe, *, steps: int = 3, prompt: list[int] | None = None) -> dict[str, Any]:
    """What a block saves, and the tokens of its request."""
    result = model.run(prompt or PROMPT, probe, max_tokens=steps, temperature=0.0, ignore_eos=True).result()
    return {**result.saves, "ids": list(result.outputs[0].token_ids)}


def assert_close(got: Any, wanted: Any, where: str = "") -> None:
    if isinstance(wanted, torch.Tensor):
        assert got.shape == wanted.shape, where
        torch.testing.assert_close(got, wanted, **CLOSE, msg=lambda text: f"{where}: {text}")
    elif isinstance(wanted, dict):
        assert got.keys() == wanted.keys(), where
        for name, value in wanted.items():
            assert_close(got[name], value, f"{where}/{name}")
    elif isinstance(wanted, (list, tuple)):
        assert len(got) == len(wanted), where
        for number, (mine, other) in enumerate(zip(got, wanted, strict=True)):
            assert_close(mine, other, f"{where}/{number}")
    else:
        assert got == wanted, where
