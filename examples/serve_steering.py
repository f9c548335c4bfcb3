"""A server, and two clients of it that need no GPU: one steers its own requests, one asks with OpenAI's client.

A real server is a process of its own: `nnsight-serve REPO`. Here it is part of the script, so that this runs as it
stands. Blocks travel as data: the server runs no code of its clients.
"""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from launch import launch
from openai import AsyncOpenAI

from nnsight_async import VLLM
from nnsight_async.serve.server import Server

PROMPT = "The weather today is"


async def main(model: Any, layer: int = 2, strength: float = 4.0, tokens: int = 12) -> dict[str, str]:
    """Serve `model`, and print what each client gets."""
    with Server(model) as server:
        print(f"serving at {server.url}")
        client = VLLM(model.repo, mode="async", serve=server.url)
        async with client:
            steered, plain = await asyncio.gather(steer(client, layer, strength, tokens), complete(server.url, tokens))
        await client.aclose()
    texts = {"steered": steered, "plain": plain}
    for name, text in texts.items():
        print(f"{name:>8}: {PROMPT}{text}")
    return texts


async def steer(client: Any, layer: int, strength: float, tokens: int) -> str:
    """Along the direction from one word to another, at every step."""
    toward = await stream_of(client, layer, " sunny") - await stream_of(client, layer, " rainy")
    vector = strength * toward / toward.norm() * toward.norm().clamp(min=1.0)
    async with client.trace(PROMPT, max_tokens=tokens, temperature=0.0) as tracer:
        for _ in tracer.iter[:]:
            client.model.layers[layer].resid_post += vector
    return (await tracer.result).outputs[0].text


async def stream_of(client: Any, layer: int, word: str) -> torch.Tensor:
    async with client.trace(word, max_tokens=1):
        stream = client.model.layers[layer].resid_post[-1].float().save()
    return await stream


async def complete(url: str, tokens: int) -> str:
    openai = AsyncOpenAI(base_url=f"{url}/v1", api_key="none is asked for")
    async with openai:
        (model, *_) = [each.id async for each in await openai.models.list()]
        answer = await openai.completions.create(model=model, prompt=PROMPT, max_tokens=tokens, temperature=0.0)
    return answer.choices[0].text


if __name__ == "__main__":
    launch(main, __doc__)
