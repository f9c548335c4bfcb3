"""Two contrasting prompts give a direction; adding it to the residual stream at every step turns the answer."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from launch import launch

FROM, TO = "I hate this. It is awful and I am so sad.", "I love this. It is wonderful and I am so happy."
PROMPT = "This morning I went outside, and I felt"


async def direction(model: Any, layer: int) -> torch.Tensor:
    """From the mean residual stream of one prompt to that of the other, as a unit vector of `[width]`."""

    async def mean(text: str) -> torch.Tensor:
        async with model.trace(text, max_tokens=1):
            hidden, residual = model.model.layers[layer].output
            stream = (hidden + residual).mean(0).save()
        return await stream

    there, here = await asyncio.gather(mean(TO), mean(FROM))
    return torch.nn.functional.normalize(there - here, dim=0)


async def continuation(model: Any, layer: int, vector: torch.Tensor, strength: float, max_tokens: int) -> str:
    """What the model goes on with while `strength` typical lengths of the stream are added along `vector`."""
    async with model.trace(PROMPT, max_tokens=max_tokens, temperature=0.0) as tracer:
        for _ in tracer.iter[:]:
            hidden, residual = model.model.layers[layer].output
            length = (hidden + residual).norm(dim=-1, keepdim=True)
            hidden += strength * length * vector
    result = await tracer.result
    return result.outputs[0].text


async def main(model: Any, strengths: tuple[float, ...] = (-0.15, 0.0, 0.15), max_tokens: int = 24) -> dict[float, str]:
    """Prints and returns one continuation for each strength; all run at the same time."""
    layer = len(model.model.layers) // 2
    vector = await direction(model, layer)
    texts = await asyncio.gather(*(continuation(model, layer, vector, each, max_tokens) for each in strengths))
    print(f"\n{PROMPT} ...")
    for strength, text in zip(strengths, texts, strict=True):
        print(f"{strength:+.2f}  {text!r}")
    return dict(zip(strengths, texts, strict=True))


if __name__ == "__main__":
    launch(main, __doc__)
