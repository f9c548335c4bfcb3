"""Ten thousand short runs leave nothing behind, in the client and in the worker."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import psutil
import pytest
import torch

from nnsight_async.testing.engine import drained

ROUND = 1000
ROUNDS = 11
GROWTH = 24 << 20
"""Bytes by which a process may be larger after the last nine rounds: allocators are not exact."""


async def short(model: Any, number: int) -> None:
    async with model.trace([5, 17, number % 500], max_tokens=2, temperature=0.0, ignore_eos=True) as tracer:
        for _ in tracer.iter[:]:
            model.model.layers[1].output[0][:] += 1
            stream = model.model.layers[2].resid_post.save()
    tokens = [token async for token in tracer.stream()]
    assert len(tokens) == 2
    assert tokens[0].saves["stream"].shape == (3, 128)


def sizes() -> dict[int, int]:
    """Bytes of private memory, by process: this one and the engine's."""
    here = psutil.Process()
    return {one.pid: one.memory_full_info().uss for one in (here, *here.children(recursive=True))}


def tensors() -> int:
    gc.collect()
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


@pytest.mark.soak
async def test_ten_thousand_short_runs(model: Any) -> None:
    before, held = {}, 0
    for number in range(ROUNDS):
        for start in range(0, ROUND, 100):
            await asyncio.gather(*(short(model, start + at) for at in range(100)))
        if number == 1:
            before, held = sizes(), tensors()
    counts = await drained(model)
    assert counts["runs"] == 0
    after = sizes()
    growth = {pid: after[pid] - before[pid] for pid in before}
    print("growth in bytes by process:", growth)
    assert max(growth.values()) < GROWTH, growth
    assert tensors() <= held + 10
