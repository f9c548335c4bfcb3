"""Blocks that look and change, and what comes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nnsight_async import VLLM

PROMPT = [5, 17, 101, 9, 33, 250, 77]
STEPS = 12
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": STEPS}
CLOSE: dict[str, float] = {"rtol": 2e-3, "atol": 2e-3}
"""Compiled kernels add up in another order, in float32 too."""

Probe = Callable[[Any, Any], object]


def streams(model: Any, tracer: Any) -> None:
    for _ in tracer.iter[:]:
        tracer.save([layer.resid_post for layer in model.model.layers], "streams")
        tracer.save(model.logits, "logits")


def steered(model: Any, tracer: Any) -> None:
    for _ in tracer.iter[:]:
        model.model.layers[1].mlp.output[:] *= 1.5
        model.model.layers[1].resid_post = model.model.layers[1].resid_post + 0.3
        tracer.save(model.logits, "logits")


def replaced(model: Any, tracer: Any) -> None:
    for step in tracer.iter[:]:
        if step % 2:
            model.model.layers[0].self_attn.output = torch.zeros_like(model.model.layers[0].self_attn.output)
        model.model.layers[2].resid_pre[:, :4] += 1.0
        tracer.save(model.logits, "logits")


def late(model: Any, tracer: Any) -> None:
    for _ in tracer.iter[:]:
        tracer.save(model.logits, "logits")
        tracer.save(model.samples, "samples")


def lens(model: Any, tracer: Any) -> None:
    for _ in tracer.iter[:]:
        stream = model.model.layers[1].resid_post[-1:]
        tracer.save(model.logits_processor(model.lm_head, model.model.norm(stream)), "lens")


PROBES: tuple[Probe, ...] = (streams, steered, replaced, late, lens)


async def outcome(model: VLLM, probe: Probe | None, prompt: list[int], **more: Any) -> tuple[list[int], dict[str, Any]]:
    """Tokens, and what was saved in each step, by name."""
    if probe is None:
        (output,) = await model.generate(prompt, **{**GREEDY, **more})
        return list(output.outputs[0].token_ids), {}
    async with model.run(prompt, probe, **{**GREEDY, **more}) as run:
        tokens = [token async for token in run.stream()]
    names = {name for token in tokens for name in token.saves}
    return [token.id for token in tokens], {name: [token.saves.get(name) for token in tokens] for name in names}


def assert_same(got: Any, expected: Any) -> None:
    assert got[0] == expected[0]
    torch.testing.assert_close(got[1], expected[1], **CLOSE)
