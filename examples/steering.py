"""One direction, many strengths: it is added to the residual stream at every step, and the answer turns.

The direction is the difference of the streams at the end of contrasting prompts. All strengths run at the same time.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import torch
from launch import launch

PAIRS = (
    ("I love this, it is so", "I hate this, it is so"),
    ("What a wonderful day, I am very", "What a terrible day, I am very"),
    ("The film was great. I thought it was", "The film was awful. I thought it was"),
)
PROMPT = "I went to the new restaurant yesterday. The food was"


@dataclass
class Steered:
    """What one strength does: the logit of one word above the other's, at the first step, and the text."""

    strength: float
    difference: float
    text: str


async def direction(model: Any, layer: int) -> torch.Tensor:
    """From the mean stream of the second of each pair to that of the first, `[width]`."""

    async def end(text: str) -> torch.Tensor:
        async with model.trace(text, max_tokens=1):
            row = model.model.layers[layer].resid_post[-1].save()
        return await row

    rows = await asyncio.gather(*(end(text) for pair in PAIRS for text in pair))
    return torch.stack(rows[::2]).mean(0) - torch.stack(rows[1::2]).mean(0)


async def steered(
    model: Any, layer: int, vector: torch.Tensor, strength: float, words: tuple[int, int], max_tokens: int
) -> Steered:
    async with model.trace(PROMPT, max_tokens=max_tokens, temperature=0.0) as tracer:
        for step in tracer.iter[:]:
            model.model.layers[layer].resid_post += strength * vector
            if step == 0:
                one, other = model.logits[0, list(words)].tolist()
                difference = (one - other).save()
    return Steered(strength, await difference, (await tracer.result).outputs[0].text)


async def main(
    model: Any,
    strengths: tuple[float, ...] = (-4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0),
    word: str = " good",
    other: str = " bad",
    max_tokens: int = 16,
) -> list[Steered]:
    """Prints and returns what each strength does."""
    layer = len(model.model.layers) // 2
    vector = await direction(model, layer)
    words = tuple(model.tokenizer(each, add_special_tokens=False).input_ids[0] for each in (word, other))
    runs = await asyncio.gather(*(steered(model, layer, vector, each, words, max_tokens) for each in strengths))
    print(f"\nstrength  {word!r} - {other!r}  {PROMPT} ...")
    for run in runs:
        print(f"{run.strength:>+8.2f}  {run.difference:>+{len(repr(word) + repr(other)) + 3}.2f}  {run.text!r}")
    return runs


if __name__ == "__main__":
    launch(main, __doc__)
