"""Operations inside a forward on a real engine, against transformers in float32."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

from nnsight_async import LocationError, OutOfOrderError, UnreadableError, save
from nnsight_async.testing.engine import drained

PROMPT = [5, 17, 101, 9, 33, 250, 77]
OTHERS = ([7, 8, 9], [40, 41, 42, 43, 44], [100])
STEPS = 4
LAYER = 1
GREEDY = {"max_tokens": STEPS, "temperature": 0.0, "ignore_eos": True}
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def rows(heads: torch.Tensor) -> torch.Tensor:
    """`[1, heads, tokens, size]` of transformers as `[tokens, heads * size]`."""
    return heads[0].transpose(0, 1).flatten(1)


@contextmanager
def rotated(hf: Any, edit: Callable[[Any, Any], Any] = lambda q, k: (q, k)) -> Iterator[list[tuple[Any, Any]]]:
    """Shows `edit` the queries and keys that layer `LAYER` of the oracle has rotated, and goes on with its result."""
    original, calls, seen = modeling_llama.apply_rotary_pos_emb, 0, []

    def rotate(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        q, k = original(*args, **kwargs)
        if calls % len(hf.model.layers) == LAYER:
            q, k = edit(q, k)
            seen.append((rows(q), rows(k)))
        calls += 1
        return q, k

    modeling_llama.apply_rotary_pos_emb = rotate
    try:
        yield seen
    finally:
        modeling_llama.apply_rotary_pos_emb = original


@torch.no_grad()
def greedy(hf: Any, prompt: list[int], steps: int = STEPS) -> tuple[list[int], torch.Tensor]:
    ids, logits = list(prompt), []
    for _ in range(steps):
        logits.append(hf(torch.tensor([ids])).logits[0, -1])
        ids.append(int(logits[-1].argmax()))
    return ids[len(prompt) :], torch.stack(logits)


@pytest.mark.backends("vllm")
async def test_rotated_queries_and_keys_of_every_step(model, hf):
    attention = model.model.layers[LAYER].self_attn
    async with model.trace(PROMPT, **GREEDY) as tracer:
        queries, keys = save([]), save([])
        for _ in tracer.iter[:]:
            q, k = attention.source.rotary_emb_0.output
            queries.append(q)
            keys.append(k)
    ids = list((await tracer.result).outputs[0].token_ids)
    with rotated(hf) as seen, torch.no_grad():
        hf(torch.tensor([PROMPT + ids[:-1]]))
    torch.testing.assert_close(torch.cat(await queries), seen[0][0], **CLOSE)
    torch.testing.assert_close(torch.cat(await keys), seen[0][1], **CLOSE)
    assert [q.shape[0] for q in await queries] == [len(PROMPT)] + [1] * (STEPS - 1)
    await drained(model)


@pytest.mark.backends("vllm")
async def test_written_queries_and_keys_among_other_requests(model, hf):
    async def edited() -> tuple[list[int], torch.Tensor]:
        async with model.trace(PROMPT, **GREEDY) as tracer:
            logits = save([])
            for _ in tracer.iter[:]:
                rotary = model.model.layers[LAYER].self_attn.source.rotary_emb_0
                q, k = rotary.output
                k *= 1.5
                rotary.output = (q * 2, k)
                logits.append(model.logits)
        return list((await tracer.result).outputs[0].token_ids), torch.cat(await logits)

    async def read(prompt: list[int]) -> torch.Tensor:
        async with model.trace(prompt, **GREEDY):
            q = model.model.layers[LAYER].self_attn.source.rotary_emb_0.output[0].save()
        return await q

    plain = asyncio.create_task(model.generate(list(OTHERS[0]), **GREEDY))
    (ids, logits), *queries = await asyncio.gather(edited(), *map(read, OTHERS))
    with rotated(hf, lambda q, k: (q * 2, k * 1.5)):
        expected_ids, expected = greedy(hf, PROMPT)
    assert ids == expected_ids
    torch.testing.assert_close(logits, expected, **CLOSE)
    for prompt, got in zip(OTHERS, queries, strict=True):
        with rotated(hf) as seen, torch.no_grad():
            hf(torch.tensor([prompt]))
        torch.testing.assert_close(got, seen[0][0], **CLOSE)
    assert list((await plain)[0].outputs[0].token_ids) == greedy(hf, OTHERS[0])[0]
    await drained(model)


@pytest.mark.backends("vllm")
async def test_an_operation_inside_a_function_that_is_called(model, hf):
    mlp = model.model.layers[LAYER].mlp
    async with model.trace(PROMPT, **GREEDY) as tracer:
        logits, before = save([]), save([])
        for _ in tracer.iter[:]:
            gated = mlp.source.maybe_fused_act_quant_0.source.act_fn_0.output
            before.append(gated.clone())
            gated[:] = gated * 0.5
            logits.append(model.logits)
    seen: list[torch.Tensor] = []

    def halve(_: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        seen.append(args[0][0])
        return (args[0] * 0.5,)

    handle = hf.model.layers[LAYER].mlp.down_proj.register_forward_pre_hook(halve)
    ids, expected = greedy(hf, PROMPT)
    handle.remove()
    assert list((await tracer.result).outputs[0].token_ids) == ids
    torch.testing.assert_close(torch.cat(await logits), expected, **CLOSE)
    torch.testing.assert_close(torch.cat(await before), seen[-1], **CLOSE)


@pytest.mark.parametrize("pair", [("vllm", "gpt2")], ids="-".join, indirect=True)
def test_values_of_gpt2_zeroed_where_they_are_split(pair):
    layer, width = pair.layers[LAYER], pair.hf.config.n_embd
    with pair.model.trace(PROMPT, **GREEDY) as tracer:
        logits = save([])
        for _ in tracer.iter[:]:
            chunk = layer.attn.source.chunk_0
            q, k, v = chunk.output
            chunk.output = (q, k, torch.zeros_like(v))
            logits.append(pair.model.logits)

    def zero(_: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.cat([output[..., : 2 * width], torch.zeros_like(output[..., 2 * width :])], dim=-1)

    handle = pair.hf_layers[LAYER].attn.c_attn.register_forward_hook(zero)
    ids, expected = greedy(pair.hf, PROMPT)
    handle.remove()
    assert list(tracer.result.outputs[0].token_ids) == ids
    torch.testing.assert_close(torch.cat(logits), expected, **CLOSE)


@pytest.mark.backends("vllm")
async def test_modules_and_operations_take_turns_up_to_the_root(model):
    layer = model.model.layers[0]
    async with model.trace(PROMPT, max_tokens=1) as tracer:
        projected = layer.self_attn.qkv_proj.output[0].save()
        parts = torch.cat(layer.self_attn.source.split_0.output, dim=-1).save()
        attended = layer.self_attn.source.o_proj_0.output[0].save()
        attention = layer.self_attn.output.save()
        normed = layer.source.post_attention_layernorm_0.output[0].save()
        last = model.model.source.norm_0.output[0].save()
        hidden = model.source.model_0.output.save()
    assert torch.equal(await projected, await parts)
    assert torch.equal(await attended, await attention)
    assert (await normed).shape == (await attention).shape
    assert torch.equal(await last, await hidden)
    await tracer.result
    await drained(model)


def in_plain_torch(norm: Any) -> Any:
    """The operations of a norm's native form, which its form on CUDA calls."""
    return norm.source.forward_native_0.source if "forward_native_0" in list(norm.source) else norm.source


@pytest.mark.backends("vllm")
async def test_a_platform_method_is_the_source_of_a_custom_op(model):
    norm = model.model.norm
    assert "forward_native" in repr(norm.source)
    async with model.trace(PROMPT, max_tokens=1):
        inside = in_plain_torch(norm).maybe_inplace_0.output[0].save()
        outside = norm.output[0].save()
    assert torch.equal(await inside, await outside)


@pytest.mark.backends("vllm")
async def test_an_operation_named_outside_the_block(model):
    operation = model.model.layers[0].mlp.source.down_proj_0
    source = model.model.layers[0].mlp.source
    async with model.trace(PROMPT, max_tokens=1):
        gate = source.gate_up_proj_0.output[0].save()
        down = operation.output[0].save()
        output = model.model.layers[0].mlp.output.save()
    assert torch.equal(await down, await output)
    assert (await gate).shape[0] == len(PROMPT)


@pytest.mark.backends("vllm")
def test_the_text_of_the_engines_forward(model):
    lines = repr(model.model.layers[0].self_attn.source).splitlines()
    assert "vllm.model_executor.models.llama.LlamaAttention.forward" in lines[0]
    names = [line.split(" -> ")[0].strip() for line in lines if " -> " in line and "def forward" not in line]
    assert [name for name in names if name.endswith("_0")] == list(model.model.layers[0].self_attn.source)
    assert list(model.model.layers[0].self_attn.source) == [
        "qkv_proj_0",
        "split_0",
        "rotary_emb_0",
        "attn_0",
        "o_proj_0",
    ]


async def error_of(model: Any, probe: Callable[[Any, Any], object]) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011  the caller looks at it
        async with model.run(PROMPT, probe, max_tokens=2) as run:
            await run.result
    await drained(model)
    return caught.value


@pytest.mark.backends("vllm")
async def test_errors_come_home(model):
    attention = model.model.layers[0].self_attn
    error = await error_of(model, lambda m, t: m.model.layers[0].self_attn.source.rotary_0.output)
    assert isinstance(error, LocationError)
    assert "model.model.layers[0].self_attn.source has no operation 'rotary_0'; did you mean rotary_emb_0" in str(error)
    error = await error_of(model, lambda m, t: in_plain_torch(m.model.norm).maybe_inplace_0.source)
    assert isinstance(error, UnreadableError)
    assert "vllm.ir.op.IrOpInplaceOverload" in str(error)
    with pytest.raises(UnreadableError, match="has no forward"):
        _ = model.model.layers.source

    def backwards(m: Any, t: Any) -> None:
        attention.source.attn_0.output
        attention.source.split_0.output

    error = await error_of(model, backwards)
    assert type(error) is OutOfOrderError
    assert "self_attn.source.split_0.output has already been passed in step 0" in str(error)


@pytest.mark.backends("vllm")
async def test_nothing_is_left_instrumented(model):
    async with model.trace(PROMPT, max_tokens=3, ignore_eos=True) as tracer:
        for _ in tracer.iter[:]:
            model.model.layers[0].self_attn.source.attn_0.input
    await tracer.result
    between = await drained(model)
    await model.generate([PROMPT], max_tokens=4, ignore_eos=True)
    after = await drained(model)
    assert after["reports"] == between["reports"]
    assert after["watched"] == 0
