"""Many requests at once, each of which gets its own tokens and values and nobody else's."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from nnsight_async import IsolationError, save
from nnsight_async.testing.engine import drained
from nnsight_async.testing.oracle import generation

pytestmark = pytest.mark.backends("vllm", "transformers")

TRACED, PLAIN, STEPS = 50, 20, 6
GREEDY = {"max_tokens": STEPS, "temperature": 0.0, "ignore_eos": True}
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@dataclass
class Steering:
    """One request: a prompt, a vector added after layer `edit`, and the layer that is read."""

    prompt: list[int]
    vector: torch.Tensor
    edit: int
    read: int


@dataclass
class Seen:
    ids: list[int]
    hidden: list[torch.Tensor]
    logits: list[torch.Tensor]
    text: str


def steerings(number: int, width: int) -> list[Steering]:
    draw = random.Random(1)
    noise = torch.Generator().manual_seed(1)
    return [
        Steering(prompt(draw), torch.randn(width, generator=noise) * 3, edit=at % 2, read=2 + at % 2)
        for at in range(number)
    ]


def prompt(draw: random.Random) -> list[int]:
    return [draw.randrange(4, 512) for _ in range(draw.randrange(1, 40))]


async def steered(model: Any, task: Steering) -> Seen:
    async with model.trace(task.prompt, **GREEDY) as tracer:
        for _ in tracer.iter[:]:
            model.model.layers[task.edit].resid_post[:] += task.vector
            hidden = model.model.layers[task.read].resid_post.save()
            logits = model.logits.save()
    tokens = [token async for token in tracer.stream()]
    result = await tracer.result
    assert list(result.outputs[0].token_ids) == [token.id for token in tokens]
    assert torch.equal(await hidden, tokens[-1].saves["hidden"])
    return Seen(
        [token.id for token in tokens],
        [token.saves["hidden"] for token in tokens],
        [token.saves["logits"] for token in tokens],
        result.outputs[0].text,
    )


def assert_same(got: Seen, wanted: Seen) -> None:
    assert got.ids == wanted.ids
    assert got.text == wanted.text
    torch.testing.assert_close(torch.cat(got.hidden), torch.cat(wanted.hidden), **CLOSE)
    torch.testing.assert_close(torch.cat(got.logits), torch.cat(wanted.logits), **CLOSE)


async def test_fifty_traces_among_plain_requests(model, hf):
    tasks = steerings(TRACED, hf.config.hidden_size)
    draw = random.Random(2)
    plain = [prompt(draw) for _ in range(PLAIN)]

    async def plainly(ids: list[int]) -> Any:
        (output,) = await model.generate(ids, **GREEDY)
        return output

    works = [*(steered(model, task) for task in tasks), *(plainly(ids) for ids in plain)]
    order = list(range(len(works)))
    draw.shuffle(order)
    running = {at: asyncio.create_task(works[at]) for at in order}
    async with asyncio.timeout(120):
        found = [await running[at] for at in range(len(works))]
    await drained(model)

    for task, together in zip(tasks, found[:TRACED], strict=True):
        assert_same(together, await steered(model, task))
        assert [rows.shape[0] for rows in together.hidden] == [len(task.prompt)] + [1] * (STEPS - 1)
    for task, together in list(zip(tasks, found, strict=False))[:8]:
        oracle = generation(hf, task.prompt, STEPS, {task.edit: lambda hidden, task=task: hidden + task.vector})
        assert together.ids == oracle.ids
        torch.testing.assert_close(torch.cat(together.logits), oracle.logits, **CLOSE)
        torch.testing.assert_close(torch.cat(together.hidden), oracle.streams[task.read], **CLOSE)
    for ids, output in zip(plain, found[TRACED:], strict=True):
        assert list(output.outputs[0].token_ids) == generation(hf, ids, STEPS).ids
    await drained(model)


async def test_equal_prompts_with_and_without_an_edit(model, hf):
    ids = [5, 17, 101, 9]
    vector = torch.randn(hf.config.hidden_size, generator=torch.Generator().manual_seed(3)) * 3
    tasks = [Steering(ids, vector * sign, 0, 2) for sign in (1, 0, -1, 0)]
    found = await asyncio.gather(*(steered(model, task) for task in tasks))
    for task, together in zip(tasks, found, strict=True):
        oracle = generation(hf, ids, STEPS, {0: lambda hidden, task=task: hidden + task.vector})
        assert together.ids == oracle.ids
        torch.testing.assert_close(torch.cat(together.hidden), oracle.streams[2], **CLOSE)


async def test_blocks_that_end_at_different_steps(model, hf):
    ids = [7, 8, 9]
    oracle = generation(hf, ids, 8)

    async def of(steps: int) -> tuple[list[int], torch.Tensor]:
        async with model.trace(ids, max_tokens=steps, temperature=0.0, ignore_eos=True) as tracer:
            logits = save([])
            for _ in tracer.iter[: steps // 2 + 1]:
                logits.append(model.logits)
        return list((await tracer.result).outputs[0].token_ids), torch.cat(await logits)

    for steps, (got, logits) in zip(range(1, 9), await asyncio.gather(*map(of, range(1, 9))), strict=True):
        assert got == oracle.ids[:steps]
        torch.testing.assert_close(logits, oracle.logits[: steps // 2 + 1], **CLOSE)
    await drained(model)


async def test_what_is_changed_after_it_was_saved_stays_as_it_was(model, hf):
    async with model.trace([5, 6, 7], max_tokens=4, temperature=0.0, ignore_eos=True) as tracer:
        total = torch.zeros_like(model.logits)
        for _ in tracer.iter[:]:
            total += model.logits
            total.save()
        total /= 4
        total.save()
    oracle = generation(hf, [5, 6, 7], 4).logits.cumsum(0)
    tokens = [token async for token in tracer.stream()]
    torch.testing.assert_close(torch.cat([token.saves["total"] for token in tokens]), oracle, **CLOSE)
    torch.testing.assert_close((await total)[0], oracle[-1] / 4, **CLOSE)


@pytest.mark.backends("vllm")
async def test_a_module_that_runs_between_the_forward_pass_and_the_sampling(model, hf):
    async def own(ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        async with model.trace(ids, **GREEDY) as tracer:
            kept = save([])
            for _ in tracer.iter[:]:
                kept.append(model.logits_processor.output)
        assert list((await tracer.result).outputs[0].token_ids) == generation(hf, ids, STEPS).ids
        return torch.cat(await kept), generation(hf, ids, STEPS).logits

    draw = random.Random(4)
    for got, wanted in await asyncio.gather(*(own(prompt(draw)) for _ in range(6))):
        torch.testing.assert_close(got, wanted, **CLOSE)


async def test_what_an_edit_leaves_in_the_cache_reaches_nobody(model, hf):
    """vLLM hands freed blocks of the key-value cache on as they are, and a NaN in them would come back."""
    prompt = [5, 17, 101, 9, 33, 250, 77]
    oracle = generation(hf, prompt, 3)
    for round_ in range(3):
        async with model.trace(prompt, max_tokens=3, temperature=0.0, ignore_eos=True) as tracer:
            for _ in tracer.iter[:]:
                model.model.layers[0].mlp.output[:] = float("nan")
        await tracer.result
        for _ in range(4):
            async with model.trace(prompt, max_tokens=3, temperature=0.0, ignore_eos=True) as tracer:
                logits = model.logits.save()
            assert list((await tracer.result).outputs[0].token_ids) == oracle.ids, f"round {round_}"
            torch.testing.assert_close(await logits, oracle.logits[:1], **CLOSE)
        (plain,) = await model.generate(prompt, max_tokens=3, temperature=0.0, ignore_eos=True)
        assert list(plain.outputs[0].token_ids) == oracle.ids
    await drained(model)


DRAWS = {"greedy": {}, "random": {"temperature": 1.0, "seed": 1}, "filtered": {"temperature": 0.7, "top_p": 0.9}}


@pytest.mark.parametrize("way", DRAWS.values(), ids=DRAWS)
async def test_an_edit_to_nan_draws_a_token_all_the_same(model, hf, way):
    """vLLM's kernels draw ids that do not exist from such logits, and to look one up ends the engine."""
    sampling = {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True}

    async def edited(value: float) -> list[int]:
        async with model.trace([5, 17, 101], **{**sampling, **way}) as tracer:
            model.model.layers[1].mlp.output[:] = value
            model.logits[:, 7] = torch.inf
        return list((await tracer.result).outputs[0].token_ids)

    plain = model.generate([5, 17, 101], **sampling)
    finite, broken, (undisturbed,) = await asyncio.gather(edited(0.0), edited(float("nan")), plain)
    assert finite[0] == broken[0] == 7
    assert all(0 <= token < hf.config.vocab_size for token in broken[1:])
    assert way or broken[1:] == [0, 0]
    assert list(undisturbed.outputs[0].token_ids) == generation(hf, [5, 17, 101], 3).ids
    await drained(model)


@pytest.mark.backends("vllm")
async def test_a_weight_is_read_and_not_changed(model, hf):
    async with model.trace([5, 17, 101], max_tokens=1, temperature=0.0) as tracer:
        weight = model.lm_head.weight[:, :4].save()
        scaled = (model.model.norm.weight * 2).save()
    torch.testing.assert_close(await weight, hf.lm_head.weight.detach()[:, :4], **CLOSE)
    torch.testing.assert_close(await scaled, hf.model.norm.weight.detach() * 2, **CLOSE)

    async with model.trace([5, 17, 101], max_tokens=1, temperature=0.0) as tracer:
        model.model.norm.weight[:] = 0
    with pytest.raises(IsolationError, match="which all requests share"):
        await tracer.result
    async with model.trace([5, 17, 101], max_tokens=1, temperature=0.0) as tracer:
        everyones = model.model.layers[0].self_attn.attn.kv_cache
    with pytest.raises(IsolationError, match="keys and values of all requests"):
        await tracer.result

    async with model.trace([5, 17, 101], max_tokens=1, temperature=0.0) as tracer:
        logits = model.logits.save()
    torch.testing.assert_close(await logits, generation(hf, [5, 17, 101], 1).logits, **CLOSE)
