"""What the model would say if it ended after each of its layers, at every position of a prompt and its continuation.

One run: the rows of the prompt come with the first token, and one more row with every token that is generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from launch import launch

PROMPT = "Paris is the capital of France. Berlin is the capital of"


async def main(model: Any, prompt: str = PROMPT, max_tokens: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Prints the likeliest next token after some layers; returns it and its probability, `[layers, positions]` each."""
    async with model.trace(prompt, max_tokens=max_tokens, temperature=0.0) as tracer:
        for _ in tracer.iter[:]:
            tops = []
            for layer in model.model.layers:
                logits = model.logits_processor(model.lm_head, model.model.norm(layer.resid_post))
                tops.append(logits.float().softmax(-1).max(-1))
            probabilities = torch.stack([top.values for top in tops]).save()
            guesses = torch.stack([top.indices for top in tops]).save()

    count = len(model.model.layers)
    shown = sorted({*range(0, count, max(1, count // 8)), count - 1})
    print("\n" + " " * 14 + "".join(f"{f'layer {number}':<14}" for number in shown))
    ids = model.tokenizer(prompt).input_ids
    async for token in tracer.stream():
        guessed = token.saves["guesses"]
        for read, column in zip(ids[-guessed.shape[1] :], guessed.T.tolist(), strict=True):
            show(model.tokenizer, [read, *(column[number] for number in shown)])
        ids.append(token.id)
    return await whole(guesses), await whole(probabilities)


def show(tokenizer: Any, ids: Sequence[int]) -> None:
    print("".join(f"{tokenizer.decode([token])!r:<14.13}" for token in ids), flush=True)


async def whole(saved: Any) -> torch.Tensor:
    """The values of all steps, side by side."""
    return torch.cat([value async for value in saved.stream()], dim=1)


if __name__ == "__main__":
    launch(main, __doc__)
