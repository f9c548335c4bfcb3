"""Two ranks with graphs that stop at taps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nnsight_async import VLLM
from tests.gpu.engines import GRAPHS, TAPS, engine
from tests.gpu.probes import PROBES, PROMPT, Probe, assert_same, outcome, streams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.fixture(scope="module")
def two(qwen3: str) -> Iterator[VLLM]:
    with engine(qwen3, taps=TAPS, tensor_parallel_size=2, **GRAPHS) as model:
        yield model


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.__name__)
async def test_two_ranks_see_and_do_what_one_does(two: VLLM, eager: VLLM, probe: Probe) -> None:
    assert_same(await outcome(two, probe, PROMPT), await outcome(eager, probe, PROMPT))


async def test_taps_pass_in_the_graphs_of_both(two: VLLM) -> None:
    assert (await two.stats())["graphs"] > 0
    before = (await two.stats())["reports"]
    await outcome(two, streams, PROMPT, max_tokens=1)
    of_prompt = (await two.stats())["reports"] - before

    await outcome(two, streams, PROMPT)

    assert (await two.stats())["reports"] - before == 2 * of_prompt


async def test_requests_in_one_batch_are_what_they_are_alone(two: VLLM, eager: VLLM) -> None:
    probes: list[Probe | None] = [*PROBES, None, None]
    prompts: list[list[int]] = [[token + number for token in PROMPT[: 3 + number % 5]] for number in range(len(probes))]

    async def of(model: VLLM, number: int) -> Any:
        return await outcome(model, probes[number], prompts[number])

    alone = [await of(eager, number) for number in range(len(probes))]
    together = await asyncio.gather(*(of(two, number) for number in range(len(probes))))

    for got, expected in zip(together, alone, strict=True):
        assert_same(got, expected)
