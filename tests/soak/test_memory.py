"""Ten thousand short runs leave nothing behind, in the client and in the worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from nnsight_async.testing.engine import drained

ROUND = 1000
ROUNDS = 10
WARM = 2
"""Rounds after which what grows once has grown: pools of threads and sockets, kernels of oneDNN by shape."""


async def short(model: Any, number: int) -> None:
    async with model.trace([5, 17, number % 500], max_tokens=2, temperature=0.0, ignore_eos=True) as tracer:
        for _ in tracer.iter[:]:
            model.model.layers[1].output[0][:] += 1
            stream = model.model.layers[2].resid_post.save()
    tokens = [token async for token in tracer.stream()]
    assert len(tokens) == 2
    assert tokens[0].saves["stream"].shape == (3, 128)


async def plain(model: Any, number: int) -> None:
    await model.generate([5, 17, number % 500], max_tokens=2, temperature=0.0, ignore_eos=True)


def held() -> dict[str, int]:
    """What this process holds: tensors and other objects of Python, and bytes that the allocator cannot give back."""
    import ctypes
    import gc

    import psutil
    import torch

    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    objects = gc.get_objects()
    tensors = sum(isinstance(thing, torch.Tensor) for thing in objects)
    return {"tensors": tensors, "objects": len(objects), "bytes": psutil.Process().memory_full_info().uss}


async def held_by_worker(model: Any) -> dict[str, int]:
    """The same of the worker: a block runs there."""

    def ask(model: Any, tracer: Any) -> None:
        tracer.save(held(), "held")

    return (await model.run([5], ask, max_tokens=1)).saves["held"]


async def rounds(model: Any, kind: Callable[[Any, int], Any], number: int) -> dict[str, tuple[int, int]]:
    """What the client and the worker hold more after so many rounds."""
    before = held(), await held_by_worker(model)
    for _ in range(number):
        for start in range(0, ROUND, 100):
            await asyncio.gather(*(kind(model, start + at) for at in range(100)))
    await drained(model)
    after = held(), await held_by_worker(model)
    return {name: (after[0][name] - before[0][name], after[1][name] - before[1][name]) for name in before[0]}


@pytest.mark.soak
async def test_ten_thousand_short_runs(model: Any) -> None:
    for kind in (short, plain):
        await rounds(model, kind, WARM)
    of_plain = (await rounds(model, plain, WARM))["bytes"]
    growth = await rounds(model, short, ROUNDS)
    assert growth["tensors"] == (0, 0)
    assert max(growth["objects"]) < ROUND, growth
    assert growth["bytes"][0] < 8 << 20, growth
    # The engine itself grows on a CPU, with plain requests as well: 10 to 20 KB each, less and less.
    assert growth["bytes"][1] / ROUNDS < of_plain[1] / WARM + (4 << 20), (growth, of_plain)
