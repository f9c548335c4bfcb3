"""A hundred chats at once, and a monitor that sees the entropy of every step of each while they go."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import torch
from launch import launch


@dataclass
class Chat:
    """One chat as far as it has gone; entropies are in nats, one for each token."""

    number: int
    text: str = ""
    entropies: list[float] = field(default_factory=list[float])
    ended: bool = False


async def follow(model: Any, chat: Chat, max_tokens: int) -> None:
    messages = [{"role": "user", "content": f"Say something about the number {chat.number}."}]

    async with model.trace(messages, max_tokens=max_tokens, temperature=0.0, ignore_eos=True) as tracer:
        for _ in tracer.iter[:]:
            entropy = torch.distributions.Categorical(logits=model.logits[0].float()).entropy().item().save()

    async for token in tracer.stream():
        chat.text += token.text
        chat.entropies.append(token.saves["entropy"])
    chat.ended = True


async def watch(chats: list[Chat], every: float) -> None:
    """Print, every so many seconds, how far the chats are and which is the least certain of its next token."""
    while True:
        await asyncio.sleep(every)
        going = [chat for chat in chats if chat.entropies and not chat.ended]
        tokens = sum(len(chat.entropies) for chat in chats)
        if going:
            least = max(going, key=lambda chat: chat.entropies[-1])
            print(f"{len(going):>3} going, {tokens:>5} tokens; {least.entropies[-1]:.2f} nats in {least.text[-40:]!r}")


async def main(model: Any, chats: int = 100, max_tokens: int = 24, every: float = 1.0) -> list[Chat]:
    all_chats = [Chat(number) for number in range(chats)]
    monitor = asyncio.create_task(watch(all_chats, every))
    try:
        async with asyncio.TaskGroup() as group:
            for chat in all_chats:
                group.create_task(follow(model, chat, max_tokens))
    finally:
        monitor.cancel()
    for chat in sorted(all_chats, key=lambda chat: max(chat.entropies))[-5:]:
        print(f"{max(chat.entropies):.2f} nats at most in {chat.number}: {chat.text[:60]!r}")
    return all_chats


if __name__ == "__main__":
    launch(main, __doc__)
