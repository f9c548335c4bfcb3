"""Declared operations in replayed CUDA graphs do what they do where vLLM calls every module."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nnsight_async import VLLM, NotASiteError
from nnsight_async.testing.oracle import generation
from tests.gpu.engines import GRAPHS, TAPS, engine
from tests.gpu.probes import CLOSE, GREEDY, PROMPT, STEPS, Probe, assert_same, late, streams

pytestmark = pytest.mark.gpu

SITES = ["model.layers[*]"]
Declare = Callable[[VLLM], list[Any]]


@pytest.fixture(scope="session")
def sited(qwen3: str) -> Iterator[VLLM]:
    with engine(qwen3, op_sites=SITES, **GRAPHS) as model:
        yield model


@pytest.fixture(scope="session")
def sited_and_tapped(qwen3: str) -> Iterator[VLLM]:
    with engine(qwen3, op_sites=SITES, taps=TAPS, **GRAPHS) as model:
        yield model


def vector(model: VLLM, seed: int) -> torch.Tensor:
    width = model._engine.manifest.modules["model.norm"].parameters[0].full_shape[0]
    return torch.randn(width, generator=torch.Generator().manual_seed(seed))


DECLARED: dict[str, Declare] = {
    "steer": lambda model: [model.steer(1, vector(model, 1), scale=1.5)],
    "ablate": lambda model: [model.ablate(1, vector(model, 1))],
    "clamp": lambda model: [model.clamp(0, vector(model, 1), min=0.5, max=1.0)],
    "replace": lambda model: [model.replace(1, vector(model, 1), positions=[1, -1, 9])],
    "every layer": lambda model: [model.steer(n, vector(model, n)) for n in range(len(model.model.layers))],
    "chain": lambda model: [
        model.steer(1, vector(model, 1), positions="generated"),
        model.ablate(1, vector(model, 2), positions=slice(2, None)),
        model.steer(1, vector(model, 2), scale=-0.5),
    ],
}


async def outcome(model: VLLM, probe: Probe, declare: Declare | None, prompt: list[int] = PROMPT) -> Any:
    """Tokens, and what was saved in each step, by name."""
    ops = None if declare is None else declare(model)
    async with model.run(prompt, probe, ops=ops, **GREEDY) as run:
        tokens = [token async for token in run.stream()]
    names = {name for token in tokens for name in token.saves}
    return [token.id for token in tokens], {name: [token.saves.get(name) for token in tokens] for name in names}


@pytest.mark.parametrize("name", DECLARED)
async def test_in_graphs_they_do_what_they_do_without(sited: VLLM, eager: VLLM, name: str) -> None:
    before = (await sited.stats())["reports"]

    found = await outcome(sited, late, DECLARED[name])

    assert (await sited.stats())["reports"] == before  # no module was called for them
    assert_same(found, await outcome(eager, late, DECLARED[name]))
    assert found[0] != (await outcome(eager, late, None))[0]


async def test_they_do_what_a_hook_in_transformers_does(sited: VLLM, qwen3: str) -> None:
    hf = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32)
    added = 1.5 * vector(sited, 1)
    expected = generation(hf, PROMPT, STEPS, {1: lambda hidden: hidden + added})

    tokens, saved = await outcome(sited, late, DECLARED["steer"])

    assert tokens == expected.ids
    torch.testing.assert_close(torch.cat(saved["logits"]), expected.logits, **CLOSE)


@pytest.mark.parametrize("name", ["sited", "sited_and_tapped"])
async def test_a_block_beside_them_sees_what_they_have_made(
    request: pytest.FixtureRequest, eager: VLLM, name: str
) -> None:
    graphs = request.getfixturevalue(name)
    for declare in (DECLARED["every layer"], DECLARED["chain"]):
        assert_same(await outcome(graphs, streams, declare), await outcome(eager, streams, declare))


async def test_each_request_of_a_batch_has_its_own_and_others_none(sited: VLLM, eager: VLLM, stepwise: VLLM) -> None:
    def declare(number: int) -> Declare | None:
        return None if number % 4 == 0 else lambda model: [model.steer(number % 3, vector(model, number))]

    prompts = [[token + number for token in PROMPT[: 3 + number % 5]] for number in range(24)]
    alone = [
        await outcome(eager if number % 4 else stepwise, late, declare(number), prompt)
        for number, prompt in enumerate(prompts)
    ]

    async def later(number: int) -> Any:
        await asyncio.sleep(0.01 * (number % 4))
        return await outcome(sited, late, declare(number), prompts[number])

    together = await asyncio.gather(*map(later, range(len(prompts))))

    for got, expected in zip(together, alone, strict=True):
        assert_same(got, expected)


async def test_what_was_compiled_for_other_sites_is_not_taken(sited: VLLM, eager: VLLM, qwen3: str) -> None:
    """The engines share vLLM's compilation cache."""
    with engine(qwen3, op_sites=["model.layers[1]"], **GRAPHS) as other:
        assert_same(await outcome(other, late, DECLARED["steer"]), await outcome(eager, late, DECLARED["steer"]))
        with pytest.raises(NotASiteError, match=r"op_sites"):
            await outcome(other, late, DECLARED["every layer"])


async def test_without_sites_an_engine_with_graphs_says_what_to_declare(stepwise: VLLM) -> None:
    with pytest.raises(NotASiteError, match=r"op_sites=\['model.layers.1'\]"):
        await outcome(stepwise, late, DECLARED["steer"])
