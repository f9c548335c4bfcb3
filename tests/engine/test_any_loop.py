"""One engine for callers of every kind at once: event loops that come and go, uvloop, and threads without a loop."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import uvloop

from nnsight_async.testing import hf_model
from nnsight_async.testing.engine import drained
from nnsight_async.testing.oracle import Generation, generation

THREADS = 10
WITHIN = 120  # seconds
STEPS = 8
GREEDY = {"max_tokens": STEPS, "temperature": 0.0, "ignore_eos": True}
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@dataclass(frozen=True)
class Case:
    """What one caller asks, with a vector of its own added after layer 1, and what transformers makes of it."""

    prompt: list[int]
    vector: torch.Tensor
    expected: Generation

    def check(self, ids: list[int], streams: list[torch.Tensor]) -> None:
        assert ids == self.expected.ids
        torch.testing.assert_close(torch.stack(streams), self.expected.streams[2][-STEPS:], **CLOSE)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """One for each thread, and one each for uvloop and asyncio."""
    hf, draw = hf_model("llama"), torch.Generator().manual_seed(5)
    made: list[Case] = []
    for number in range(THREADS + 2):
        prompt, vector = [5, 17, 101 + number, 9 * number], torch.randn(128, generator=draw)
        expected = generation(hf, prompt, STEPS, {1: lambda hidden, vector=vector: hidden + vector})
        made.append(Case(prompt, vector, expected))
    return made


def traced(model: Any, case: Case) -> int:
    """A sync trace, checked; returns how many tokens it made."""
    vector = case.vector
    with model.trace(case.prompt, **GREEDY) as tracer:
        streams = [].save()
        for _ in tracer.iter[:]:
            model.model.layers[1].output[0][:] += vector
            streams.append(model.model.layers[2].resid_post[-1])
    case.check(list(tracer.result.outputs[0].token_ids), streams)
    return STEPS


async def streamed(model: Any, case: Case) -> int:
    """The same, token by token."""
    vector = case.vector
    async with model.trace(case.prompt, **GREEDY) as tracer:
        for _ in tracer.iter[:]:
            model.model.layers[1].output[0][:] += vector
            stream = model.model.layers[2].resid_post[-1].save()
    tokens = [token async for token in tracer.stream()]
    case.check([token.id for token in tokens], [token.saves["stream"] for token in tokens])
    assert torch.equal(await stream, tokens[-1].saves["stream"])
    return STEPS


def test_threads_uvloop_and_one_loop_after_another_share_an_engine(model, cases):
    """Threads and uvloop trace again and again until two event loops have come and gone in this thread."""
    before = asyncio.run(drained(model))
    begun, over = threading.Barrier(THREADS + 2), threading.Event()

    def in_thread(case: Case) -> int:
        begun.wait(WITHIN)
        made = traced(model, case)
        while not over.is_set():
            made += traced(model, case)
        return made

    async def in_uvloop(case: Case) -> int:
        assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
        await asyncio.to_thread(begun.wait, WITHIN)
        made = await streamed(model, case)
        while not over.is_set():
            made += await streamed(model, case)
        return made

    *for_threads, for_uvloop, for_loops = cases
    with ThreadPoolExecutor(THREADS + 1) as pool:
        others = [pool.submit(in_thread, case) for case in for_threads]
        others.append(pool.submit(uvloop.run, in_uvloop(for_uvloop)))
        try:
            begun.wait(WITHIN)
            made = [asyncio.run(streamed(model, for_loops)) for _ in range(2)]
        finally:
            over.set()
    made += [other.result() for other in others]

    after = asyncio.run(drained(model))
    assert after["finished"] - before["finished"] == sum(made) / STEPS
    assert {name: after[name] - before[name] for name in ("failed", "cancelled")} == {"failed": 0, "cancelled": 0}
    assert after["steps"] - before["steps"] < sum(made), "no step served two of them"
