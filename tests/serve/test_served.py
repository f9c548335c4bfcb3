"""Traces on a server: the same tokens and values as on the engine itself, which are transformers' own."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from nnsight_async import (
    VLLM,
    CaptureError,
    LocationError,
    NotSavedError,
    OutOfOrderError,
    RunCancelledError,
    SaveBudgetError,
    ServerError,
    ShapeError,
    UnsupportedError,
)
from nnsight_async.runs.ops import Vector
from nnsight_async.serve.server import Server
from nnsight_async.testing import hf_model
from nnsight_async.testing.engine import drained
from nnsight_async.testing.oracle import generation
from tests.conftest import LONG

PROMPT = [5, 17, 101, 9, 33, 250, 77]
STEPS = 5
GREEDY = {"max_tokens": STEPS, "temperature": 0.0, "ignore_eos": True}
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
VECTOR = 3 * torch.randn(128, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def hf() -> Any:
    return hf_model("llama")


@pytest.fixture(scope="module")
def plain(hf: Any) -> Any:
    return generation(hf, PROMPT, STEPS)


@pytest.fixture(scope="module")
def steered(hf: Any) -> Any:
    return generation(hf, PROMPT, STEPS, {1: lambda hidden: hidden + VECTOR})


async def test_values_of_each_step_are_streamed(client, plain):
    async with client.trace(PROMPT, **GREEDY) as tracer:
        for _ in tracer.iter[:]:
            hidden = client.model.layers[2].resid_post[-1].save()
    tokens = [token async for token in tracer.stream()]
    assert [token.id for token in tokens] == plain.ids
    assert [token.index for token in tokens] == list(range(STEPS))
    assert tokens[-1].finish_reason == "length"
    rows = torch.stack([token.saves["hidden"] for token in tokens])
    torch.testing.assert_close(rows, plain.streams[2][len(PROMPT) - 1 :], **CLOSE)
    torch.testing.assert_close(await hidden, rows[-1])
    output = await tracer.result
    assert output.outputs[0].token_ids == plain.ids
    assert output.outputs[0].text == "".join(token.text for token in tokens)
    assert output.finished
    assert output.prompt_token_ids == PROMPT
    torch.testing.assert_close(output.saves["hidden"], rows[-1])


async def test_edits_in_place_land(client, steered):
    async with client.trace(PROMPT, **GREEDY) as tracer:
        rows = [].save()
        for _ in tracer.iter[:]:
            client.model.layers[1].output[0][:] += VECTOR
            rows.append(client.model.layers[2].resid_post[-1])
    assert [token.id async for token in tracer.stream()] == steered.ids
    torch.testing.assert_close(torch.stack(await rows), steered.streams[2][len(PROMPT) - 1 :], **CLOSE)


async def test_a_replacement_lands(client, steered):
    async with client.trace(PROMPT, **GREEDY) as tracer:
        for _ in tracer.iter[:]:
            client.model.layers[1].resid_post = client.model.layers[1].resid_post + VECTOR
    assert (await tracer.result).outputs[0].token_ids == steered.ids


async def test_directions_are_projected_out_scaled_and_clamped(client, hf):
    unit = VECTOR / VECTOR.norm()

    def changed(hidden):
        hidden = hidden - (hidden @ unit)[..., None] * unit
        return (hidden * 1.5).clamp(-4.0, 4.0)

    oracle = generation(hf, PROMPT, STEPS, {1: changed})
    async with client.trace(PROMPT, **GREEDY) as tracer:
        for _ in tracer.iter[:]:
            h = client.model.layers[1].resid_post
            h = h - (h @ unit)[:, None] * unit
            client.model.layers[1].resid_post = (h * 1.5).clamp(-4.0, 4.0)
    assert (await tracer.result).outputs[0].token_ids == oracle.ids


async def test_a_logit_lens(client, plain, hf):
    model = client.model
    async with client.trace(PROMPT, max_tokens=1, temperature=0.0):
        h = model.layers[2].resid_post[-1:]
        lens = client.logits_processor(client.lm_head, model.norm(h)).save()
        top = lens.topk(3).save()
    row = plain.streams[2][len(PROMPT) - 1]
    expected = hf.lm_head(hf.model.norm(row))
    torch.testing.assert_close((await lens)[0], expected, **CLOSE)
    _, ids = await top
    assert ids[0].tolist() == expected.topk(3).indices.tolist()


async def test_loops_over_what_is_known_are_unrolled(client, plain):
    wanted = {"first": 0, "last": 3}
    layers = client.model.layers
    async with client.trace(PROMPT, max_tokens=1) as tracer:
        found = [].save()
        for i in range(wanted["first"], 4):
            found.append(layers[i].resid_post[-1])
    found = torch.stack(await found)
    expected = torch.stack([plain.streams[i][len(PROMPT) - 1] for i in range(4)])
    torch.testing.assert_close(found, expected, **CLOSE)


async def test_a_condition_on_what_is_read_stops_the_run(client, plain):
    third = plain.ids[2]
    async with client.trace(PROMPT, **GREEDY) as tracer:
        for _ in tracer.iter[:]:
            drawn = client.samples[0, 0].save()
            if drawn == third:
                tracer.stop()
    output = await tracer.result
    assert output.outputs[0].token_ids == plain.ids[:3]
    assert output.outputs[0].finish_reason == "stop"
    assert (await drawn).item() == third


async def test_the_drawn_token_is_replaced(client):
    async with client.trace(PROMPT, **GREEDY) as tracer:
        for _ in tracer.iter[1:3]:
            client.samples[:] = 7
    ids = (await tracer.result).outputs[0].token_ids
    assert ids[1:3] == [7, 7]


async def test_a_probe_function_and_its_values_by_name(client, plain):
    def probe(model, tracer):
        norms = tracer.save([], "norms")
        for _ in tracer.iter[:]:
            norms.append(model.model.layers[2].resid_post[-1].norm())

    async with client.run(PROMPT, probe, **GREEDY) as run:
        norms = await run.saves["norms"]
    expected = plain.streams[2][len(PROMPT) - 1 :].norm(dim=-1)
    torch.testing.assert_close(torch.stack(norms), expected, **CLOSE)


async def test_map_and_generate(client, plain):
    def probe(model, tracer):
        last = model.model.layers[2].resid_post[-1].save()

    prompts = [PROMPT, PROMPT[:3], PROMPT[:5]]
    found = {result.index: result async for result in client.map(prompts, probe, max_tokens=1, progress=False)}
    for index, prompt in enumerate(prompts):
        torch.testing.assert_close(found[index].saves["last"], plain.streams[2][len(prompt) - 1], **CLOSE)
    (output,) = await client.generate([PROMPT], logprobs=2, **GREEDY)
    assert output.outputs[0].token_ids == plain.ids
    assert [max(step, key=lambda token: step[token].logprob) for step in output.outputs[0].logprobs] == plain.ids


async def test_sequences_and_invokes(client, plain):
    async with client.trace(PROMPT, n=2, seed=3, max_tokens=2, temperature=1.0) as tracer:
        last = client.model.layers[2].resid_post[-1].save()
    values = await last
    assert len(values) == 2
    torch.testing.assert_close(values[0], values[1])
    async with client.trace(max_tokens=1) as tracer:
        async with tracer.invoke(PROMPT) as one:
            last = client.model.layers[2].resid_post[-1].save()
        async with tracer.invoke(PROMPT[:4]) as other:
            last = client.model.layers[2].resid_post[-1].save()
    for value, at in zip(await last, (len(PROMPT), 4), strict=True):
        torch.testing.assert_close(value, plain.streams[2][at - 1], **CLOSE)
    assert len(await tracer.result) == 2


async def test_edits_are_the_engines_and_end_when_they_are_cleared(client, vllm_model, steered, plain):
    async with client.edit("steering") as (tracer, edit):
        for _ in tracer.iter[:]:
            client.model.layers[1].output[0][:] += VECTOR
    (local,) = await vllm_model.generate([PROMPT], **GREEDY)
    assert local.outputs[0].token_ids == steered.ids
    (without,) = await client.generate([PROMPT], edits=[], **GREEDY)
    assert without.outputs[0].token_ids == plain.ids
    await edit.clear()
    (after,) = await client.generate([PROMPT], **GREEDY)
    assert after.outputs[0].token_ids == plain.ids


async def test_values_of_edits_come_with_the_runs(client, plain):
    def probe(model, tracer):
        seen = model.model.layers[0].resid_post[-1].save()

    edit = await client.edit(probe, name="watch")
    try:
        async with client.trace(PROMPT, max_tokens=1, temperature=0.0) as tracer:
            own = client.model.layers[2].resid_post[-1].save()
        saves = (await tracer.result).saves
        torch.testing.assert_close(saves["seen"], plain.streams[0][len(PROMPT) - 1], **CLOSE)
        torch.testing.assert_close(saves["own"], plain.streams[2][len(PROMPT) - 1], **CLOSE)
        with pytest.raises(ValueError, match="watch"):
            await client.generate([PROMPT], edits=["wach"], max_tokens=1)
    finally:
        await client.clear_edits()


def test_in_a_thread_values_are_bound_at_once(data_server, llama, plain):
    with VLLM(llama, serve=data_server.url) as model:
        with model.trace(PROMPT, **GREEDY) as tracer:
            hidden = model.model.layers[2].resid_post[-1].save()
        torch.testing.assert_close(hidden, plain.streams[2][len(PROMPT) - 1], **CLOSE)
        assert tracer.result.outputs[0].token_ids == plain.ids

        def probe(model, tracer):
            drawn = model.samples.save()

        assert model.run(PROMPT, probe, max_tokens=1).result().saves["drawn"].shape == (1, 1)
        assert [output.finished for output in model.generate([PROMPT, "hello"], max_tokens=2)] == [True, True]


async def test_one_trace_on_a_server_and_the_next_on_an_engine_of_its_own(vllm_model, data_server, plain):
    model = vllm_model
    async with model.trace(PROMPT, serve=data_server.url, **GREEDY) as there:
        hidden = model.model.layers[2].resid_post[-1].save()
    served = await hidden
    async with model.trace(PROMPT, **GREEDY) as here:
        hidden = model.model.layers[2].resid_post[-1].save()
    torch.testing.assert_close(served, await hidden)
    assert (await there.result).outputs[0].token_ids == (await here.result).outputs[0].token_ids


# -- errors ------------------------------------------------------------------------------------------------------------


async def test_an_error_of_a_block_is_the_one_of_a_local_run_at_its_line(client):
    async with client.trace(PROMPT, max_tokens=2):
        h = client.model.layers[2].resid_post
        client.model.layers[2].resid_post = h[:3]
        never = h.save()
    with pytest.raises(ShapeError) as raised:
        await never
    last = raised.traceback[-1]
    assert str(last.path) == __file__
    assert "resid_post = h[:3]" in str(last.statement)
    assert any("prompt:" in note for note in raised.value.__notes__)


async def test_an_error_of_torch_and_a_value_that_was_not_saved(client):
    async with client.trace(PROMPT, max_tokens=1):
        h = (client.model.layers[2].resid_post @ client.model.layers[2].resid_post).save()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        await h
    async with client.trace(PROMPT, max_tokens=1):
        if client.model.layers[2].resid_post.norm() < 0:
            never = client.samples.save()
    with pytest.raises(NotSavedError):
        await never


async def test_a_location_that_has_passed(client):
    async with client.trace(PROMPT, max_tokens=1):
        late = client.model.layers[2].resid_post
        early = client.model.layers[0].resid_post.save()
    with pytest.raises(OutOfOrderError):
        await early


async def test_what_is_wrong_with_a_call_is_said_there_or_where_it_is_awaited(client):
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        client.trace(PROMPT, temprature=0.0)
    with pytest.raises(ValueError, match="empty"):
        client.trace([])
    with pytest.raises(UnsupportedError, match="extra_args"):
        client.trace(PROMPT, extra_args={})
    with pytest.raises(ValueError, match="temperature"):
        await client.generate([PROMPT], temperature=-1.0)
    with pytest.raises(ValueError, match=r"max_model_len|maximum"):
        await client.generate([[1] * 5000])
    async with client.trace(PROMPT):
        x = client.model.layerz[0].output.save()
    with pytest.raises(CaptureError, match=r"did you mean model\.model\.layers"):
        await x
    with pytest.raises(ValueError, match="greedy"):
        client.trace(PROMPT, n=2, temperature=0.0)


async def test_what_is_no_data_is_named_where_it_stands(client):
    async with client.trace(PROMPT, max_tokens=1):
        h = client.model.layers[2].resid_post
        print(h.shape)
        h = h.save()
    with pytest.raises(CaptureError, match=r"test_served.py, line \d+: `print\(h\.shape\)` cannot travel as data"):
        await h
    async with client.trace(PROMPT, max_tokens=1) as tracer:
        found = eval("1")
    with pytest.raises(CaptureError, match=r"`eval\('1'\)`"):
        await tracer.result


async def test_a_server_that_allows_it_runs_any_block(open_server, llama, plain, capsys):
    import math

    async with VLLM(llama, mode="async", serve=open_server.url) as model:
        scale = math.pi

        async with model.trace(PROMPT, max_tokens=2, temperature=0.0) as tracer:
            h = model.model.layers[2].resid_post[-1]
            found = {f"{len(h)} wide": h * scale, "nested": [(h.norm().item(), None)]}
            print("seen", tuple(h.shape))
            found = found.save()
        found = await found
        assert list(found) == ["128 wide", "nested"]
        torch.testing.assert_close(found["128 wide"], plain.streams[2][len(PROMPT) - 1] * math.pi, **CLOSE)
        assert "seen (128,)" in capsys.readouterr().out

        class OwnError(Exception):
            pass

        async with model.trace(PROMPT, max_tokens=2) as tracer:
            h = model.model.layers[2].resid_post
            raise OwnError("what it was")
        with pytest.raises(Exception, match="OwnError: what it was") as raised:
            await tracer.result
        assert type(raised.value).__name__ == "BlockError"
        assert str(raised.traceback[-1].path) == __file__


async def test_large_tensors_travel_with_blocks_of_python(open_server, llama, plain):
    table = torch.randn(3000, 128, generator=torch.Generator().manual_seed(1))
    async with VLLM(llama, mode="async", serve=open_server.url) as model:
        for _ in range(2):
            async with model.trace(PROMPT, max_tokens=1):
                scores = sorted(float(x) for x in (table @ model.model.layers[2].resid_post[-1]))[-3:]
                scores = scores.save()
            expected = (table @ plain.streams[2][len(PROMPT) - 1]).sort().values[-3:].tolist()
            assert await scores == pytest.approx(expected, rel=1e-3)


# -- leaving -----------------------------------------------------------------------------------------------------------


async def test_leaving_a_stream_aborts_the_run_there(client, vllm_model):
    before = (await drained(vllm_model))["aborted"]
    async with client.trace(PROMPT, **LONG) as tracer:
        h = client.model.layers[2].resid_post[-1].save()
    async with tracer.stream() as stream:
        await anext(stream)
    with pytest.raises(RunCancelledError):
        await h
    await drained(vllm_model)
    assert (await vllm_model.stats())["aborted"] == before + 1


async def test_many_at_a_time_have_each_its_own(client, plain, vllm_model):
    async def one(length):
        async with client.trace(PROMPT[:length], max_tokens=3, temperature=0.0):
            h = client.model.layers[2].resid_post[-1].save()
        return await h

    lengths = [1 + i % len(PROMPT) for i in range(32)]
    values = await asyncio.gather(*map(one, lengths))
    for length, value in zip(lengths, values, strict=True):
        torch.testing.assert_close(value, plain.streams[2][length - 1], **CLOSE)
    await drained(vllm_model)


async def test_nobody_there(llama):
    model = VLLM(llama, mode="async", serve="http://127.0.0.1:9")
    with pytest.raises(ServerError, match="cannot be reached"):
        await model.generate([PROMPT])
    model.close()
    with pytest.raises(ValueError, match="the address of a server"):
        VLLM(llama, serve="ftp://somewhere")


async def test_another_model_there(data_server):
    with pytest.raises(ServerError, match="serves"):
        VLLM("somebody/else", serve=data_server.url, dispatch=True)


async def test_a_run_that_saves_too_much(client, vllm_model):
    big = torch.zeros(1 << 17)
    limit = vllm_model._engine._limits
    object.__setattr__(limit, "save_bytes", 1 << 20)
    try:
        async with client.trace(PROMPT, **GREEDY):
            kept = big.save()
            kept = (big + 1).save()
            more = [big, big + 1, big + 2].save()
        with pytest.raises(SaveBudgetError):
            await more
    finally:
        object.__setattr__(limit, "save_bytes", 1 << 30)


# -- declared operations -----------------------------------------------------------------------------------------------


async def test_declared_operations_travel_as_data(client: VLLM, hf: Any) -> None:
    vector = 2 * torch.randn(128, generator=torch.Generator().manual_seed(1))
    unit = vector / vector.norm()

    def edit(x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([x[:, :1], x[:, 1:] + 1.5 * vector], dim=1)
        along = x @ unit
        return x + (along.clamp(max=0.5) - along)[..., None] * unit

    layer = client.model.layers[1]
    ops = [client.steer(layer, vector, scale=1.5, positions=slice(1, None)), client.clamp(1, vector, max=0.5)]
    ops += [client.ablate(2, vector.bfloat16()), client.replace(0, vector, positions=[-1, 2]), client.capture(0, "h")]
    rounded = vector.bfloat16().float() / vector.bfloat16().float().norm()
    wanted = generation(
        hf,
        PROMPT,
        4,
        {
            0: lambda x: torch.index_copy(x, 1, torch.tensor([len(PROMPT) - 1, 2]), vector.expand(1, 2, 128)),
            1: edit,
            2: lambda x: x - (x @ rounded)[..., None] * rounded,
        },
    )

    (output,) = await client.generate(PROMPT, ops=ops, max_tokens=4, temperature=0.0, ignore_eos=True)

    assert list(output.outputs[0].token_ids) == wanted.ids
    torch.testing.assert_close(output.saves["h"], wanted.streams[0][-1:], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="position -90 does not exist"):
        await client.generate(PROMPT, ops=[client.steer(1, vector, positions=-90)])


async def test_an_edit_of_operations_is_the_engines(client: VLLM, vllm_model: Any, steered: Any, plain: Any) -> None:
    edit = await client.edit(ops=[client.steer(1, VECTOR)], name="calm")
    try:
        assert str(edit) == "<the edit 'calm'>"
        (local,) = await vllm_model.generate([PROMPT], **GREEDY)
        assert local.outputs[0].token_ids == steered.ids
        async with client.trace(PROMPT, **GREEDY) as tracer:
            streams = [].save()
            for _ in tracer.iter[:]:
                streams.append(client.model.layers[2].resid_post[-1])
        assert (await tracer.result).outputs[0].token_ids == steered.ids
        torch.testing.assert_close(torch.stack(await streams), steered.streams[2][len(PROMPT) - 1 :], **CLOSE)
        (without,) = await client.generate([PROMPT], edits=[], **GREEDY)
        assert without.outputs[0].token_ids == plain.ids
        with pytest.raises(TypeError, match="captures with a block"):
            await client.edit(ops=[client.capture(1, "h")])
        with pytest.raises(LocationError):
            await client.edit(ops=[replace(client.steer(1, VECTOR), path="model.norm")])
    finally:
        await edit.clear()
    (after,) = await client.generate([PROMPT], **GREEDY)
    assert after.outputs[0].token_ids == plain.ids
    assert not vllm_model.edits


async def test_a_server_declares_operations_anew(client: VLLM, data_server: Server) -> None:
    """What a client sends need not have been made by our own code."""
    good = client.steer(1, torch.ones(128))
    for bad, error in (
        (replace(good, path="model.norm"), LocationError),
        (replace(good, path=""), LocationError),
        (replace(good, low=float("nan")), ValueError),
        (replace(good, vector=Vector(b"", "float32", b"123", 1)), ValueError),
        (replace(good, vector=Vector.of(torch.ones(64))), ShapeError),
        (replace(good, vector=Vector.of(torch.full((128,), torch.inf))), ValueError),
        (replace(good, positions=("slice", None, None, -1)), ValueError),
        (replace(good, positions=()), ValueError),
    ):
        with pytest.raises(error):
            await client.generate(PROMPT, ops=[bad], max_tokens=1)
    assert (await client.generate(PROMPT, ops=[good], max_tokens=1))[0].outputs
