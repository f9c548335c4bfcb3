"""Edits on requests that are sent through vLLM's own interface, past ours."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineGenerateError

from nnsight_async.runs.shipment import KEY
from nnsight_async.testing.engine import drained
from nnsight_async.testing.oracle import generation
from tests.conftest import LONG

pytestmark = pytest.mark.backends("vllm")

PROMPT = [5, 17, 101, 9, 33, 250, 77]
STEPS = 5
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
VECTOR = 3 * torch.randn(128, generator=torch.Generator().manual_seed(3))
KINDS = pytest.mark.parametrize("kind", list(RequestOutputKind), ids=lambda kind: kind.name)


@pytest.fixture(autouse=True)
def no_edit_stays(model: Any) -> Iterator[None]:
    yield
    model.clear_edits()


@pytest.fixture(scope="session")
def plain(hf: Any) -> Any:
    return generation(hf, PROMPT, STEPS)


@pytest.fixture(scope="session")
def steered(hf: Any) -> Any:
    return generation(hf, PROMPT, STEPS, {1: lambda hidden: hidden + VECTOR})


def steers(model: Any, tracer: Any) -> None:
    rows = tracer.save([], "rows")
    for _ in tracer.iter[:]:
        model.model.layers[1].output[0][:] += VECTOR
        rows.append(model.model.layers[2].resid_post[-1])


async def sent(model: Any, prompt: Any = None, **sampling: Any) -> list[Any]:
    """What vLLM's own `generate` gives, one output after the other."""
    asked = {"max_tokens": STEPS, "temperature": 0.0, "ignore_eos": True, **sampling}
    params, number = SamplingParams(**asked), object()

    async def outputs() -> list[Any]:
        given = prompt or {"prompt_token_ids": PROMPT}
        return [output async for output in model.vllm_entrypoint.generate(given, params, f"own-{id(number)}")]

    return await asyncio.wrap_future(model._engine.call(outputs()))


def drawn(outputs: list[Any], kind: RequestOutputKind, index: int = 0) -> list[int]:
    parts = [one for output in outputs for one in output.outputs if one.index == index]
    if kind == RequestOutputKind.DELTA:
        return [token for part in parts for token in part.token_ids]
    return list(parts[-1].token_ids)


@KINDS
async def test_they_run_and_their_values_come_with_the_last_output(model, steered, kind):
    await model.edit(steers)
    outputs = await sent(model, output_kind=kind)
    assert drawn(outputs, kind) == steered.ids
    assert outputs[-1].finished
    torch.testing.assert_close(torch.stack(outputs[-1].saves["rows"]), steered.streams[2][len(PROMPT) - 1 :], **CLOSE)
    await drained(model)


async def test_text_and_lists_of_ids_as_prompts(model, steered):
    await model.edit(steers)
    text = model.tokenizer.decode(PROMPT)
    wanted = await sent(model, prompt=text)
    assert wanted[-1].saves["rows"][0].shape == (128,)
    assert drawn(await sent(model, prompt=PROMPT), RequestOutputKind.CUMULATIVE) == steered.ids


async def test_they_are_chosen_by_an_extra_argument(model, steered, plain):
    await model.edit(steers, name="steering")
    for edits, wanted in ((None, steered), (["steering"], steered), ("steering", steered), ([], plain)):
        outputs = await sent(model, extra_args=None if edits is None else {"edits": edits})
        assert list(outputs[-1].outputs[0].token_ids) == wanted.ids
    with pytest.raises(VLLMClientError, match="did you mean 'steering'"):
        await sent(model, extra_args={"edits": ["stering"]})


async def test_without_edits_nothing_is_added(model, plain):
    outputs = await sent(model)
    assert list(outputs[-1].outputs[0].token_ids) == plain.ids
    assert not hasattr(outputs[-1], "saves")


@KINDS
async def test_several_sequences(model, steered, kind):
    await model.edit(steers)
    outputs = await sent(model, output_kind=kind, n=3, temperature=0.01, seed=5)
    assert [drawn(outputs, kind, index) for index in range(3)] == [steered.ids] * 3
    for rows in outputs[-1].saves["rows"]:
        torch.testing.assert_close(torch.stack(rows), steered.streams[2][len(PROMPT) - 1 :], **CLOSE)
    await drained(model)


async def test_an_error_ends_the_request_that_ran_it(model, plain):
    def fails(model: Any, tracer: Any) -> None:
        for step in tracer.iter[:]:
            if step == 2:
                raise LookupError("on purpose")

    await model.edit(fails, name="failing")
    failing = [asyncio.create_task(sent(model)) for _ in range(3)]
    healthy = await sent(model, extra_args={"edits": []})
    assert list(healthy[-1].outputs[0].token_ids) == plain.ids
    for each in failing:
        with pytest.raises(EngineGenerateError) as caught:
            await each
        assert str(caught.value.__cause__) == "on purpose"
        assert type(caught.value.__cause__) is LookupError
    await drained(model)


@KINDS
async def test_an_edit_ends_the_request(model, steered, kind):
    def stops(model: Any, tracer: Any) -> None:
        for step in tracer.iter[:]:
            model.model.layers[1].output[0][:] += VECTOR
            if step == 2:
                tracer.save(int(model.samples), "last")
                tracer.stop()

    await model.edit(stops)
    outputs = await sent(model, output_kind=kind, max_tokens=100)
    assert drawn(outputs, kind) == steered.ids[:3]
    assert outputs[-1].outputs[0].finish_reason == "stop"
    assert outputs[-1].saves == {"last": steered.ids[2]}
    texts = [output.outputs[0].text for output in outputs]
    text = "".join(texts) if kind == RequestOutputKind.DELTA else texts[-1]
    assert text.rstrip("\ufffd") == model.tokenizer.decode(steered.ids[:3]).rstrip("\ufffd")  # half a character
    several = await sent(model, output_kind=kind, max_tokens=30, n=2, temperature=0.01)
    assert [drawn(several, kind, index) for index in range(2)] == [steered.ids[:3]] * 2
    await drained(model)


async def test_a_caller_who_leaves(model):
    await model.edit(steers)

    async def some() -> None:
        params = SamplingParams(**LONG)
        stream = model.vllm_entrypoint.generate({"prompt_token_ids": PROMPT}, params, "left")
        async for _ in stream:
            break
        await stream.aclose()

    await asyncio.wrap_future(model._engine.call(some()))
    await drained(model)


async def test_a_prompt_that_streams_in_is_refused(model):
    async def pieces() -> Any:
        yield {"prompt_token_ids": PROMPT}

    await model.edit(steers)
    with pytest.raises(VLLMClientError, match="streams in"):
        await sent(model, prompt=pieces())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_a_request_that_vllm_has_prepared_already(model, steered):
    await model.edit(steers)
    llm, params = model.vllm_entrypoint, SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True)

    async def outputs() -> list[Any]:
        tasks = await llm.get_supported_tasks()
        ready = llm.input_processor.process_inputs("ready", {"prompt_token_ids": PROMPT}, params, supported_tasks=tasks)
        return [output async for output in llm.generate(ready, SamplingParams(), "ready")]

    last = (await asyncio.wrap_future(model._engine.call(outputs())))[-1]
    assert list(last.outputs[0].token_ids) == steered.ids
    assert len(last.saves["rows"]) == STEPS
    assert params.extra_args is None
    await drained(model)


async def test_each_of_many_sequences_has_its_own_values(model):
    def draws(model: Any, tracer: Any) -> None:
        ids = tracer.save([], "ids")
        for _ in tracer.iter[:]:
            ids.append(int(model.samples))

    await model.edit(draws)
    (last,) = await sent(model, n=12, temperature=1.0, seed=3, output_kind=RequestOutputKind.FINAL_ONLY)
    assert last.saves["ids"] == [list(one.token_ids) for one in last.outputs]
    assert len(set(map(tuple, last.saves["ids"]))) > 6
    await drained(model)


async def test_they_carry_no_shipment(model):
    """Which would name runs of others to the worker, and edits that they are not to run."""
    for forged in ([[1], None, 1 << 30, 60.0, [1], False], "x", None):
        with pytest.raises(VLLMClientError, match="not for requests"):
            await sent(model, extra_args={KEY: forged})
    await drained(model)


async def test_an_edit_of_declared_operations_needs_no_block(model, steered, plain):
    await model.edit(ops=[model.steer(1, VECTOR)], name="steers")
    outputs = await sent(model)
    assert outputs[-1].outputs[0].token_ids == steered.ids
    assert (await sent(model, extra_args={"edits": []}))[-1].outputs[0].token_ids == plain.ids

    await model.edit(reads_the_stream, name="reads")
    outputs = await sent(model)
    assert outputs[-1].outputs[0].token_ids == steered.ids
    torch.testing.assert_close(torch.cat(outputs[-1].saves["streams"]), steered.streams[1], **CLOSE)
    await model.clear_edits()
    assert (await sent(model))[-1].outputs[0].token_ids == plain.ids


def reads_the_stream(model: Any, tracer: Any) -> None:
    rows = tracer.save([], "streams")
    for _ in tracer.iter[:]:
        rows.append(model.model.layers[1].resid_post)
