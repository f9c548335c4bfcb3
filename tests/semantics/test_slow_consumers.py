"""Who reads a stream too slowly has a run that fails, or goes on without some values; all others have theirs."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from nnsight_async import VLLM, SlowConsumerError
from nnsight_async.runs.history import SlowConsumers
from nnsight_async.testing.engine import drained
from nnsight_async.testing.oracle import generation

pytestmark = pytest.mark.backends("vllm")

PROMPT = [5, 6, 7, 8]
STEPS = 24
ROW = 128 * 4  # bytes of one row of the hidden width, in float32
SAMPLING = {"max_tokens": STEPS, "temperature": 0.0, "ignore_eos": True}


def reads(model: Any, tracer: Any) -> None:
    for _ in tracer.iter[:]:
        tracer.save(model.model.layers[1].resid_post[-1], "row")


@pytest.fixture
def rows(hf: Any) -> torch.Tensor:
    return generation(hf, PROMPT, STEPS).streams[1][len(PROMPT) - 1 :]


@pytest.fixture
def limited(model: VLLM, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The shared engine, with another limit for the runs of a test."""

    def limit(buffered: int, slow_consumers: SlowConsumers) -> None:
        engine: Any = model._engine
        limits = replace(engine._limits, buffered_bytes=buffered, slow_consumers=slow_consumers)
        monkeypatch.setattr(engine, "_limits", limits)

    return limit


async def read(stream: Any, tokens: list[Any]) -> None:
    async for token in stream:
        tokens.append(token)  # noqa: PERF401


async def in_time(model: VLLM, rows: torch.Tensor) -> None:
    async with model.run(PROMPT, reads, **SAMPLING) as run:
        found = [token.saves["row"] async for token in run.stream()]
    torch.testing.assert_close(torch.stack(found), rows, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("unhurried")
async def test_a_slow_reader_fails_alone(model, rows, limited, tmp_path):
    opened = tmp_path / "opened"

    def reads_when_opened(model: Any, tracer: Any) -> None:
        while not opened.exists():
            time.sleep(0.01)
        for _ in tracer.iter[:]:
            tracer.save(model.model.layers[1].resid_post[-1], "row")

    limited(6 * ROW, "fail")
    async with model.run(PROMPT, reads_when_opened, **SAMPLING) as run:
        stream = run.stream()
        opened.touch()
        first = await anext(stream)
        with pytest.raises(SlowConsumerError):
            await run.result  # the stream is not read meanwhile
        limited(sys.maxsize, "fail")
        await asyncio.gather(*(in_time(model, rows) for _ in range(3)))
        kept = [first]
        with pytest.raises(SlowConsumerError, match="max_buffered_bytes=3,072"):
            await read(stream, kept)
    assert 6 < len(kept) < STEPS
    torch.testing.assert_close(
        torch.stack([token.saves["row"] for token in kept]), rows[: len(kept)], rtol=1e-4, atol=1e-4
    )
    await drained(model)


async def test_a_slow_reader_goes_on_without_the_oldest(model, rows, limited):
    limited(6 * ROW, "drop")
    before = (await model.stats())["dropped_steps"]
    async with model.run(PROMPT, reads, **SAMPLING) as run:
        stream = run.stream()
        await run.result
        tokens = [token async for token in stream]
    assert len(tokens) == STEPS
    *early, _, _, _, _, _, _ = tokens
    assert all(token.dropped and not token.saves for token in early)
    torch.testing.assert_close(
        torch.stack([token.saves["row"] for token in tokens[-6:]]), rows[-6:], rtol=1e-4, atol=1e-4
    )
    counts = await drained(model)
    assert counts["dropped_steps"] - before == STEPS - 6


def test_unknown_ways(llama):
    with pytest.raises(ValueError, match="'fail' or 'drop', not 'pause'"):
        VLLM(llama, slow_consumers="pause")
