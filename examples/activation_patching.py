"""Where the answer is carried: the residual stream of a clean prompt, put into a corrupted one, place by place.

One run for each layer and each of the last positions, all at the same time; each sends back a single number.
"""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from launch import launch

CLEAN, CORRUPTED = "The capital of France is", "The capital of Italy is"


async def streams(model: Any, prompt: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The residual stream after each layer, `[tokens, width]` each, and the logits, `[vocab]`."""
    async with model.trace(prompt, max_tokens=1):
        after = [layer.resid_post.save() for layer in model.model.layers]
        logits = model.logits[0].save()
    return await after, await logits


async def patched(
    model: Any, prompt: list[int], layer: int, position: int, row: torch.Tensor, answers: tuple[int, int]
) -> float:
    """The logit difference of two answers in a run whose residual stream after `layer` is `row` at `position`."""
    async with model.trace(prompt, max_tokens=1):
        model.model.layers[layer].resid_post[position] = row
        wanted, other = model.logits[0, list(answers)].tolist()
        difference = (wanted - other).save()
    return await difference


async def main(model: Any, clean: str = CLEAN, corrupted: str = CORRUPTED, last: int = 8) -> torch.Tensor:
    """Prints and returns `[layers, positions]`: 0 where the patch changes nothing, 1 where it brings all back."""
    good, bad = model.tokenizer(clean).input_ids, model.tokenizer(corrupted).input_ids
    if len(good) != len(bad):
        raise ValueError(f"the prompts must have equally many tokens, and have {len(good)} and {len(bad)}")
    (rows, right), (_, wrong) = await asyncio.gather(streams(model, good), streams(model, bad))
    answers = telling(right, wrong)

    layers, positions = range(len(rows)), range(max(0, len(bad) - last), len(bad))
    places = [(layer, position) for layer in layers for position in positions]
    differences = await asyncio.gather(
        *(patched(model, bad, layer, position, rows[layer][position], answers) for layer, position in places)
    )
    low, high = (float(logits[answers[0]] - logits[answers[1]]) for logits in (wrong, right))
    grid = (torch.tensor(differences).view(len(layers), len(positions)) - low) / (high - low)

    words = [repr(model.tokenizer.decode([token])) for token in (*answers, *bad)]
    print(f"\n{words[0]} against {words[1]}: {high:+.2f} in the clean run, {low:+.2f} in the corrupted one")
    show(grid, [words[2 + position] for position in positions])
    return grid


def telling(right: torch.Tensor, wrong: torch.Tensor) -> tuple[int, int]:
    """What the clean and the corrupted run answer; where they answer alike, the two tokens that move most."""
    answers = int(right.argmax()), int(wrong.argmax())
    return answers if answers[0] != answers[1] else (int((right - wrong).argmax()), int((wrong - right).argmax()))


def show(grid: torch.Tensor, words: list[str]) -> None:
    print("layer" + "".join(f"{word:>12}" for word in words))
    for layer, row in enumerate(grid.tolist()):
        print(f"{layer:>5}" + "".join(f"{value:>10.2f} {shade(value)}" for value in row))


def shade(value: float) -> str:
    return " ░▒▓█"[round(4 * min(max(value, 0.0), 1.0))]


if __name__ == "__main__":
    launch(main, __doc__)
