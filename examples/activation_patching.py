"""Which layers carry the answer: the stream of a clean prompt, put into a corrupted one, layer by layer, row by row."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from launch import launch

CLEAN, CORRUPTED = "The capital of France is", "The capital of Poland is"


async def streams(model: Any, prompt: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The residual stream after each layer, `[tokens, width]` each, and the logits, `[vocab]`."""
    async with model.trace(prompt, max_tokens=1, temperature=0.0):
        after = [(layer.output[0] + layer.output[1]).save() for layer in model.model.layers]
        logits = model.logits[0].save()
    return await after, await logits


async def patched(model: Any, prompt: list[int], layer: int, position: int, row: torch.Tensor) -> torch.Tensor:
    """Logits of a run whose residual stream after `layer` is `row` at `position`."""
    async with model.trace(prompt, max_tokens=1, temperature=0.0):
        hidden, residual = model.model.layers[layer].output
        hidden[position], residual[position] = row, 0
        logits = model.logits[0].save()
    return await logits


async def main(model: Any, clean: str = CLEAN, corrupted: str = CORRUPTED) -> torch.Tensor:
    """Prints and returns `[layers, positions]`: 0 where the patch changes nothing, 1 where it brings all back."""
    good, bad = model.tokenizer(clean).input_ids, model.tokenizer(corrupted).input_ids
    if len(good) != len(bad):
        raise ValueError("the two prompts must have equally many tokens")
    (rows, right), (_, wrong) = await asyncio.gather(streams(model, good), streams(model, bad))
    wanted, other = int(right.argmax()), int(wrong.argmax())
    if wanted == other:  # no difference to explain: take the two that move most
        wanted, other = int((right - wrong).argmax()), int((wrong - right).argmax())

    places = [(layer, at) for layer in range(len(rows)) for at in range(len(bad))]
    runs = await asyncio.gather(*(patched(model, bad, layer, at, rows[layer][at]) for layer, at in places))
    low, high = wrong[wanted] - wrong[other], right[wanted] - right[other]
    restored = torch.stack([(logits[wanted] - logits[other] - low) / (high - low) for logits in runs])
    grid = restored.reshape(len(rows), len(bad))
    show(grid, [model.tokenizer.decode([token]) for token in bad])
    return grid


def show(grid: torch.Tensor, words: list[str]) -> None:
    print("\nlayer  " + "".join(f"{word!r:>12}" for word in words))
    for layer, row in enumerate(grid.tolist()):
        print(f"{layer:>5}  " + "".join(f"{value:>12.2f}" for value in row))


if __name__ == "__main__":
    launch(main, __doc__)
