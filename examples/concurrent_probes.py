"""Twenty chats at once, each with a probe whose score comes with every token; the one that goes too far is stopped."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import torch
from launch import launch

SUBJECTS = (
    "the sea", "winter", "a lost dog", "bread", "the moon", "an old car", "music", "rain", "a long walk", "bees",
    "the city", "a garden", "trains", "silence", "a storm", "tea", "mountains", "a letter", "the night", "dancing",
)  # fmt: skip


@dataclass
class Chat:
    """One chat as far as it went."""

    subject: str
    text: str = ""
    scores: list[float] = field(default_factory=list[float])
    stopped: bool = False


async def follow(model: Any, subject: str, direction: torch.Tensor, limit: float, max_tokens: int) -> Chat:
    """Chat about `subject`, and leave as soon as the score along `direction` (`[width]`) is above `limit`."""
    chat = Chat(subject)
    messages = [{"role": "user", "content": f"Write one sentence about {subject}."}]
    middle = model.model.layers[len(model.model.layers) // 2]

    async with model.trace(messages, max_tokens=max_tokens, temperature=0.0, ignore_eos=True) as tracer:
        for _ in tracer.iter[:]:
            hidden, residual = middle.output
            score = torch.cosine_similarity((hidden + residual)[-1], direction, dim=0).item()
            tracer.save(score, "score")

    async with tracer.stream() as stream:  # leaving it aborts the request
        async for token in stream:
            chat.text += token.text
            chat.scores.append(token.saves["score"])
            if chat.scores[-1] > limit:
                chat.stopped = True
                break
    return chat


async def together(model: Any, direction: torch.Tensor, limit: float, max_tokens: int) -> list[Chat]:
    return await asyncio.gather(*(follow(model, each, direction, limit, max_tokens) for each in SUBJECTS))


async def main(model: Any, max_tokens: int = 16) -> list[Chat]:
    """Runs all chats to see how high scores go, and once more with a limit that only the highest is above."""
    async with model.trace("sadness", max_tokens=1):
        hidden, residual = model.model.layers[len(model.model.layers) // 2].output
        stream = (hidden + residual)[-1].save()
    direction = await stream

    peaks = sorted(max(chat.scores) for chat in await together(model, direction, float("inf"), max_tokens))
    chats = await together(model, direction, (peaks[-1] + peaks[-2]) / 2, max_tokens)
    for chat in chats:
        end = "stopped" if chat.stopped else "ended"
        print(f"{chat.subject:<12} {end:<8} after {len(chat.scores):>2}  {max(chat.scores):+.3f}  {chat.text[:50]!r}")
    return chats


if __name__ == "__main__":
    launch(main, __doc__)
