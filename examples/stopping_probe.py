"""A linear probe reads every step of many chats at once, and stops those in which its score goes too far.

The score of each step streams home beside its token. The stop is inside the block: no token more is computed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import torch
from launch import launch

SAD = ("I am so sad and lonely.", "The funeral was full of tears.", "He lost everything he had.")
PLAIN = ("I am going to the shop.", "The meeting was full of people.", "He found everything he needed.")
SUBJECTS = (
    "the sea", "winter", "a lost dog", "bread", "the moon", "an old car", "music", "rain", "a long walk", "bees",
    "the city", "a garden", "trains", "silence", "a storm", "tea", "mountains", "a letter", "the night", "dancing",
)  # fmt: skip


@dataclass(frozen=True)
class Probe:
    """`stream @ weight + bias` after one layer: +1 and -1 at the means of what it was fitted to."""

    layer: int
    weight: torch.Tensor
    bias: float


@dataclass
class Chat:
    """One chat as far as it went."""

    subject: str
    text: str = ""
    scores: list[float] = field(default_factory=list[float])
    stopped: bool = False


async def fitted(model: Any, layer: int) -> Probe:
    """A probe for the difference between the means of two kinds of text."""

    async def mean(text: str) -> torch.Tensor:
        async with model.trace(text, max_tokens=1):
            stream = model.model.layers[layer].resid_post[1:].mean(0).save()
        return (await stream).float()

    means = await asyncio.gather(*(mean(text) for text in (*SAD, *PLAIN)))
    sad, plain = torch.stack(means[: len(SAD)]).mean(0), torch.stack(means[len(SAD) :]).mean(0)
    weight = 2 * (sad - plain) / (sad - plain).square().sum()
    return Probe(layer, weight, float(-weight @ (sad + plain) / 2))


async def follow(model: Any, subject: str, probe: Probe, limit: float, max_tokens: int) -> Chat:
    """Chat about `subject` until the score is above `limit`."""
    messages = [{"role": "user", "content": f"Write one sentence about {subject}."}]

    async with model.trace(messages, max_tokens=max_tokens, temperature=0.0, ignore_eos=True) as tracer:
        for _ in tracer.iter[:]:
            stream = model.model.layers[probe.layer].resid_post[-1].float()
            score = (stream @ probe.weight + probe.bias).item().save()
            if score > limit:
                tracer.stop()

    chat = Chat(subject)
    async for token in tracer.stream():
        chat.text += token.text
        chat.scores.append(token.saves["score"])
        chat.stopped = token.finish_reason == "stop"
    return chat


async def together(model: Any, probe: Probe, limit: float, max_tokens: int) -> list[Chat]:
    return await asyncio.gather(*(follow(model, each, probe, limit, max_tokens) for each in SUBJECTS))


async def main(model: Any, max_tokens: int = 16) -> list[Chat]:
    """Runs all chats to see how high scores go, and once more with a limit that three of them go above."""
    probe = await fitted(model, len(model.model.layers) // 2)
    peaks = sorted(max(chat.scores) for chat in await together(model, probe, float("inf"), max_tokens))
    chats = await together(model, probe, (peaks[-3] + peaks[-4]) / 2, max_tokens)
    for chat in chats:
        end = "stopped" if chat.stopped else "ended"
        print(f"{chat.subject:<12} {end:<8} after {len(chat.scores):>2}  {max(chat.scores):+.2f}  {chat.text[:60]!r}")
    return chats


if __name__ == "__main__":
    launch(main, __doc__)
