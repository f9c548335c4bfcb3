"""Blocks that need not run, on an engine: what comes of them is what comes of blocks that do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight_async import VLLM, OutOfOrderError
from nnsight_async.testing import hf_model

PROMPTS = [[5, 17, 101], [9], [77, 31, 8, 250, 12], [40, 41], [9], [300, 2, 301]]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}


def same(value: Any) -> Any:
    """A call, which only running the block can tell anything of."""
    return value


def steered(vector: torch.Tensor, *, runs: bool) -> Any:
    """The same block twice, once as one that has to run."""

    def plain(model: Any, tracer: Any) -> None:
        streams = [].save()
        for _ in tracer.iter[:]:
            model.model.layers[1].output[0][-1] += 0.5 * vector
            mlp = model.model.layers[2].mlp.output[-1, :7].save()
            model.model.layers[2].resid_post -= vector
            streams.append(model.model.layers[2].resid_post)
            logits = model.logits.save()
            drawn = model.samples.save()

    def python(model: Any, tracer: Any) -> None:
        streams = [].save()
        for _ in tracer.iter[:]:
            same(model).model.layers[1].output[0][-1] += 0.5 * vector
            mlp = model.model.layers[2].mlp.output[-1, :7].save()
            model.model.layers[2].resid_post -= vector
            streams.append(model.model.layers[2].resid_post)
            logits = model.logits.save()
            drawn = model.samples.save()

    return python if runs else plain


async def counted(model: VLLM) -> int:
    return (await model.stats())["planned"]


async def test_many_at_once_are_each_as_if_it_ran(model: VLLM) -> None:
    vectors = [torch.randn(128, generator=torch.Generator().manual_seed(number)) for number in range(len(PROMPTS))]
    expected = [
        await model.run(prompt, steered(v, runs=True), **GREEDY).saves
        for prompt, v in zip(PROMPTS, vectors, strict=True)
    ]
    before = await counted(model)

    runs = [model.run(prompt, steered(v, runs=False), **GREEDY) for prompt, v in zip(PROMPTS, vectors, strict=True)]
    plain = model.generate(PROMPTS[0], **GREEDY)
    found = [await run.saves for run in runs]

    assert await counted(model) - before == len(PROMPTS)
    for ours, theirs in zip(found, expected, strict=True):
        assert [len(each["streams"]) for each in (ours, theirs)] == [5, 5]
        torch.testing.assert_close(ours, theirs)
    assert len((await plain)[0].outputs[0].token_ids) == 5


async def test_a_body_is_told_from_its_text(model: VLLM) -> None:
    before = await counted(model)
    async with model.trace(PROMPTS[0], **GREEDY) as tracer:
        for _ in tracer.iter[1:3]:
            hidden = model.model.layers[1].resid_post.save()
    values = [value async for value in hidden.stream()]
    assert await counted(model) == before + 1

    ids = (await tracer.result).outputs[0].token_ids
    with torch.no_grad():
        states = hf_model("llama")(torch.tensor([[*PROMPTS[0], *ids]]), output_hidden_states=True).hidden_states[2][0]
    torch.testing.assert_close(torch.cat(values), states[3:5], rtol=1e-4, atol=1e-4)


async def test_an_edit_of_all_traffic_is_done_together(model: VLLM) -> None:
    layer = model.model.layers[1]
    async with model.edit() as (tracer, edit):
        for _ in tracer.iter[:]:
            layer.output[0][:] *= 0
            seen = layer.output[0].save()
    before = await counted(model)
    outputs = await model.generate(PROMPTS, **GREEDY)
    await edit.clear()

    assert await counted(model) - before == len(PROMPTS)
    for output in outputs:
        assert output.saves["seen"].shape == (1, 128)
        assert not output.saves["seen"].any()


async def test_what_is_out_of_order_runs_and_raises_at_its_line(model: VLLM) -> None:
    before = await counted(model)
    async with model.trace(PROMPTS[0], **GREEDY) as tracer:
        for _ in tracer.iter[:]:
            late = model.model.layers[2].output.save()
            early = model.model.layers[1].output.save()
    with pytest.raises(OutOfOrderError) as raised:
        await tracer.result
    assert "early = model" in str(raised.traceback[-1].statement)
    assert await counted(model) == before


async def test_an_edit_and_the_block_of_a_request_follow_each_other(model: VLLM) -> None:
    layer = model.model.layers[1]
    async with model.edit() as (tracer, edit):
        for _ in tracer.iter[:]:
            layer.output[0][:] *= 2
            edited = layer.output[0].save()
    before = await counted(model)
    async with model.trace(PROMPTS[0], **GREEDY) as both:
        for _ in both.iter[:]:
            seen = layer.output[0].save()
            layer.output[0][:] *= 0
            gone = layer.output[0].save()
    async with model.trace(PROMPTS[0], **GREEDY) as runs:
        for _ in runs.iter[:]:
            ran = same(layer.output[0]).save()
    values, other = (await both.result).saves, (await runs.result).saves
    await edit.clear()

    assert await counted(model) - before == 3
    assert values["edited"].any()
    torch.testing.assert_close(values["seen"], values["edited"])
    assert not values["gone"].any()
    torch.testing.assert_close(other["ran"], other["edited"])


async def test_an_error_is_at_its_line_and_ends_its_run_alone(model: VLLM) -> None:
    wide = torch.zeros(3, 128)
    others = [model.run(prompt, steered(torch.zeros(128), runs=False), **GREEDY) for prompt in PROMPTS]
    async with model.trace(PROMPTS[2], **GREEDY) as tracer:
        for _ in tracer.iter[:]:
            hidden = model.model.layers[0].output[0].save()
            model.model.layers[1].output[0][:] += wide
    with pytest.raises(RuntimeError, match="must match the size") as raised:
        await tracer.result
    assert raised.traceback[-1].path.name == "test_plans.py"
    assert "output[0][:] += wide" in str(raised.traceback[-1].statement)
    for run in others:
        assert len((await run.saves)["streams"]) == 5


async def test_bytes_are_bounded_and_counted(model: VLLM) -> None:
    def block(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            tracer.save(model.model.layers[0].output, "pair")

    before = await model.stats()
    await model.run(PROMPTS[2], block, **GREEDY).saves
    after = await model.stats()
    assert after["planned"] == before["planned"] + 1
    assert after["bytes"] - before["bytes"] > 9 * 2 * 128 * 4
