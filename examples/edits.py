"""Two edits on one engine: a probe that scores everybody's requests, and a steering that a request can ask for.

Nobody who sends a request has to trace it. The scores ride on the outputs of plain requests.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import torch
from launch import launch
from steering import direction

PROMPTS = ("My day at work was", "I went to the new restaurant yesterday. The food was", "The weather today is")


@dataclass
class Answer:
    """What a prompt gave: its text, and the mean score of its tokens."""

    prompt: str
    edits: tuple[str, ...]
    text: str
    score: float


async def answered(model: Any, prompt: str, edits: tuple[str, ...], max_tokens: int) -> Answer:
    """A plain request, which runs the probe because all requests do, and of the named edits those that it names."""
    (output,) = await model.generate(prompt, max_tokens=max_tokens, temperature=0.0, edits=edits)
    return Answer(prompt, edits, output.outputs[0].text, torch.cat(output.saves["scores"]).mean().item())


async def main(model: Any, strength: float = 3.0, max_tokens: int = 12) -> list[Answer]:
    """Prints and returns the answers with and without the steering."""
    layer = len(model.model.layers) // 2
    vector = await direction(model, layer)
    unit = vector / vector.norm()

    async with model.edit("cheerful") as (tracer, steering):
        for _ in tracer.iter[:]:
            model.model.layers[layer].resid_post += strength * vector

    async with model.edit() as (tracer, probe):  # without a name, nobody can leave it out
        scores = [].save()
        for _ in tracer.iter[:]:
            scores.append(model.model.layers[layer].resid_post[-1:] @ unit)

    print(f"\ninstalled: {', '.join(map(str, model.edits))}")
    chosen = [(prompt, edits) for prompt in PROMPTS for edits in ((), ("cheerful",))]
    answers = await asyncio.gather(*(answered(model, prompt, edits, max_tokens) for prompt, edits in chosen))
    for answer in answers:
        print(f"{answer.score:>+8.2f}  {'cheerful' if answer.edits else '':8}  {answer.prompt} ...{answer.text!r}")

    await steering.clear()
    await probe.clear()
    return answers


if __name__ == "__main__":
    launch(main, __doc__)
