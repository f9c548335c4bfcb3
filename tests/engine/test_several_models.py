"""Several engines in one process, and one engine of several workers, which is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from nnsight_async import VLLM, EngineClosedError, EngineDeadError, UnsupportedError
from nnsight_async.testing import hf_model, tiny_checkpoint
from nnsight_async.testing.engine import drained
from nnsight_async.testing.oracle import Generation, generation
from tests.conftest import LONG, engine_args_for_long
from tests.engine.test_lifecycle import core_of

PROMPTS = [[5, 17, 101], [9, 8, 7, 6, 300], [44, 2, 91, 12]]
STEPS = 8
SAMPLING: dict[str, Any] = {"max_tokens": STEPS, "ignore_eos": True, "temperature": 0.0}
NAMES = ("llama", "qwen3")
WITHIN = 300.0  # seconds


def every_step(model: Any, tracer: Any) -> None:
    for _ in tracer.iter[:]:
        tracer.save(model.logits[0], "logits")
        tracer.save(model.lm_head.weight.shape[1], "width")


def forever(model: Any, tracer: Any) -> None:
    for _ in tracer.iter[:]:
        tracer.save(model.logits[0], "logits")


@pytest.fixture(scope="module")
def expected() -> dict[str, list[Generation]]:
    return {name: [generation(hf_model(name), prompt, STEPS) for prompt in PROMPTS] for name in NAMES}


async def check(model: VLLM, number: int, expected: Generation) -> int:
    """One run against transformers; returns the width of the model it ran on."""
    async with model.run(PROMPTS[number], every_step, **SAMPLING) as run:
        logits = torch.stack([token.saves["logits"] async for token in run.stream()])
        output = await run.result
    torch.testing.assert_close(logits, expected.logits, rtol=1e-3, atol=1e-3)
    assert output.outputs[0].token_ids == expected.ids
    return output.saves["width"]


async def check_interleaved(models: dict[str, VLLM], expected: dict[str, list[Generation]]) -> None:
    """All prompts on all models at the same time, twice."""
    async with asyncio.TaskGroup() as tasks:
        widths = {
            name: [
                tasks.create_task(check(model, number, expected[name][number]))
                for number in range(len(PROMPTS))
                for _ in range(2)
            ]
            for name, model in models.items()
        }
    assert {name: {task.result() for task in started} for name, started in widths.items()} == {
        name: {{"llama": 128, "qwen3": 64}[name]} for name in models
    }


@asynccontextmanager
async def endless(model: VLLM) -> AsyncIterator[Any]:
    """A run that will not end by itself, under way."""
    async with model.run(PROMPTS[0], forever, **LONG) as run:
        stream = run.saves["logits"].stream()
        await anext(stream)
        yield run


async def test_two_models_at_the_same_time(expected: dict[str, list[Generation]]) -> None:
    models = {name: VLLM(tiny_checkpoint(name), mode="async", **engine_args_for_long()) for name in NAMES}
    llama, qwen3 = models.values()
    async with asyncio.timeout(WITHIN), llama, qwen3:
        await asyncio.gather(*(model.dispatch() for model in models.values()))
        await check_interleaved(models, expected)
        for model in models.values():
            assert (await drained(model))["finished"] == 2 * len(PROMPTS)

        async with endless(qwen3) as run, asyncio.TaskGroup() as tasks:
            for number in range(len(PROMPTS)):
                tasks.create_task(check(llama, number, expected["llama"][number]))
            await qwen3.aclose()
            with pytest.raises(EngineClosedError):
                await run.result
        await check_interleaved({"llama": llama}, expected)

        async with VLLM(tiny_checkpoint("qwen3"), mode="async", **engine_args_for_long()) as another:
            await check_interleaved({"llama": llama, "qwen3": another}, expected)
            async with endless(another) as run, asyncio.TaskGroup() as tasks:
                for number in range(len(PROMPTS)):
                    tasks.create_task(check(llama, number, expected["llama"][number]))
                core_of(another).kill()
                with pytest.raises(EngineDeadError, match="SIGKILL"):
                    await run.result
            await check_interleaved({"llama": llama}, expected)
        await drained(llama)


def test_data_parallel_workers_are_refused(llama: str) -> None:
    with pytest.raises(UnsupportedError, match="build as many models as you want replicas"):
        VLLM(llama, mode="async", data_parallel_size=2)
