"""How much each layer's MLP matters for each prompt, as many measurements as fit into the time there is.

A `TaskGroup` under `asyncio.timeout`: when the time is up, what is still in flight is aborted in the engine.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from launch import launch

PROMPTS = ("The capital of France is", "Two plus two is", "The opposite of hot is", "The colour of the sky is")

Measured = dict[tuple[str, int], float]


async def without(model: Any, prompt: str, layer: int, measured: Measured, room: asyncio.Semaphore) -> None:
    """How far the logit of the plain answer falls when the layer's MLP adds nothing."""
    async with room:
        async with model.trace(prompt, max_tokens=1, temperature=0.0) as tracer:
            model.model.layers[layer].mlp.output[:] = 0
            edited = model.logits[0].float().save()
        async with model.trace(prompt, max_tokens=1, temperature=0.0) as tracer:
            plain = model.logits[0].float().save()
        before, after = await plain, await edited
        answer = int(before.argmax())
        measured[prompt, layer] = float(before[answer] - after[answer])


async def main(model: Any, seconds: float = 60.0, at_once: int = 16) -> Measured:
    measured: Measured = {}
    room = asyncio.Semaphore(at_once)
    layers = range(len(model.model.layers))
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            for prompt in PROMPTS:
                for layer in layers:
                    group.create_task(without(model, prompt, layer, measured, room))
    print(f"{len(measured)} of {len(PROMPTS) * len(layers)} in time; the fall of the answer's logit, layer by layer:")
    for prompt in PROMPTS:
        falls = (f"{measured[prompt, layer]:+6.2f}" if (prompt, layer) in measured else "     -" for layer in layers)
        print(f"{prompt:<28} {' '.join(falls)}")
    return measured


if __name__ == "__main__":
    launch(main, __doc__)
