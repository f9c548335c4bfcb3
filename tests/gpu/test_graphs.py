"""What blocks see and do where vLLM replays CUDA graphs is what they see and do where it calls every module."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nnsight_async import VLLM, NotATapError
from nnsight_async.testing.oracle import generation
from tests.gpu.engines import UNCOMPILED, engine
from tests.gpu.probes import (
    CLOSE,
    PROBES,
    PROMPT,
    STEPS,
    Probe,
    assert_same,
    late,
    lens,
    outcome,
    replaced,
    steered,
    streams,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["stepwise", "tapped"])
def graphs(request: pytest.FixtureRequest) -> VLLM:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.__name__)
async def test_blocks_see_and_change_what_they_do_without_graphs(graphs: VLLM, eager: VLLM, probe: Probe) -> None:
    assert_same(await outcome(graphs, probe, PROMPT), await outcome(eager, probe, PROMPT))


async def test_they_see_what_transformers_computes(graphs: VLLM, qwen3: str) -> None:
    hf = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32)
    expected = generation(hf, PROMPT, STEPS)

    tokens, saved = await outcome(graphs, streams, PROMPT)

    assert tokens == expected.ids
    torch.testing.assert_close(torch.cat(saved["logits"]), expected.logits, **CLOSE)
    for number, stream in enumerate(expected.streams):
        torch.testing.assert_close(torch.cat([step[number] for step in saved["streams"]]), stream, **CLOSE)


async def test_every_step_of_a_block_has_its_values(graphs: VLLM) -> None:
    tokens, saved = await outcome(graphs, streams, PROMPT)

    assert len(tokens) == len(saved["streams"]) == STEPS
    rows = [len(PROMPT), *[1] * (STEPS - 1)]
    assert [[stream.shape[0] for stream in step] for step in saved["streams"]] == [
        [number] * len(saved["streams"][0]) for number in rows
    ]


async def test_plain_requests_call_no_module(graphs: VLLM) -> None:
    before = (await graphs.stats())["reports"]

    tokens, _ = await outcome(graphs, None, PROMPT)

    assert len(tokens) == STEPS
    assert (await graphs.stats())["reports"] == before


async def test_a_block_that_waits_for_logits_alone_calls_modules_in_no_step(graphs: VLLM) -> None:
    before = (await graphs.stats())["reports"]

    await outcome(graphs, late, PROMPT)

    assert (await graphs.stats())["reports"] == before


async def test_taps_pass_in_replayed_graphs(tapped: VLLM) -> None:
    """The modules are called for the prompt alone; the values of the steps after it come from the graphs."""
    assert (await tapped.stats())["graphs"] > 0
    before = (await tapped.stats())["reports"]
    await outcome(tapped, streams, PROMPT, max_tokens=1)
    of_prompt = (await tapped.stats())["reports"] - before

    _, saved = await outcome(tapped, streams, PROMPT)

    assert len(saved["streams"]) == STEPS
    assert (await tapped.stats())["reports"] - before == 2 * of_prompt


async def test_requests_in_one_batch_are_what_they_are_alone(graphs: VLLM, eager: VLLM) -> None:
    probes: list[Probe | None] = [streams, None, steered, late, replaced, None, lens] * 3
    prompts = [[token + number for token in PROMPT[: 3 + number % 5]] for number in range(len(probes))]
    alone = [await outcome(eager, probe, prompt) for probe, prompt in zip(probes, prompts, strict=True)]

    async def later(number: int) -> Any:
        await asyncio.sleep(0.01 * (number % 4))
        return await outcome(graphs, probes[number], prompts[number])

    together = await asyncio.gather(*map(later, range(len(probes))))

    for got, expected in zip(together, alone, strict=True):
        assert_same(got, expected)


async def test_a_place_that_is_no_tap_is_refused_in_the_step_that_asks(tapped: VLLM) -> None:
    def elsewhere(model: Any, tracer: Any) -> None:
        for step in tracer.iter[:]:
            tracer.save(model.model.layers[1].output[0], "hidden")
            if step == 3:
                model.model.layers[2].mlp.output

    with pytest.raises(NotATapError, match=r"model.model.layers\[2\].mlp.output is not one of the taps"):
        await outcome(tapped, elsewhere, PROMPT)
    assert len((await outcome(tapped, streams, PROMPT))[0]) == STEPS


async def test_operations_can_be_taps(qwen3: str, eager: VLLM) -> None:
    def rotated(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            q, k = model.model.layers[1].self_attn.source.rotary_emb_0.output
            tracer.save(q.norm(dim=-1), "norm")
            k[:] *= 0.5
            tracer.save(model.logits, "logits")

    operation = "model.layers[1].self_attn.source.rotary_emb_0.output"
    with engine(qwen3, taps=[operation], **UNCOMPILED) as model:
        assert model.taps == ("model.model.layers[1].self_attn.source.rotary_emb_0.output",)
        assert_same(await outcome(model, rotated, PROMPT), await outcome(eager, rotated, PROMPT))


async def test_a_stream_that_a_layer_keeps_is_changed_for_it_too(gpt2: str) -> None:
    """In the middle of a GPT-2 layer, the stream is in a variable of the layer's own."""

    def middle(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            model.transformer.h[1].resid_mid += 0.5
            tracer.save(model.transformer.h[1].resid_post, "after")
            tracer.save(model.logits, "logits")

    taps = ["transformer.h[1].resid_mid", "transformer.h[1].resid_post"]
    with engine(gpt2) as without, engine(gpt2, taps=taps, **UNCOMPILED) as model:
        assert_same(await outcome(model, middle, PROMPT), await outcome(without, middle, PROMPT))
