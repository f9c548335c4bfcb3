# ruff: noqa: PT012, SIM117 -- a block is what is assigned in it, and may well be several statements
"""A block is that of one request on one model: what belongs to another is refused, with what to write instead."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from nnsight_async import VLLM, CaptureError, LocationError, OutsideBlockError, ShippingError, save
from nnsight_async.testing.engine import tiny_engine_args
from nnsight_async.testing.oracle import generation

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
PROMPT = [5, 17, 101, 9, 33, 250, 77]
OTHER = [7, 8, 9]
GREEDY = {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True}
SIDE_BY_SIDE = r"`with tracer\.invoke\(prompt\):` for each"


@pytest.fixture(scope="module")
def other(llama: str) -> Iterator[VLLM]:
    """The same checkpoint as another model, not on an engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield VLLM(llama, mode="async", **tiny_engine_args())


def test_a_trace_in_a_block(model):
    with pytest.raises(CaptureError, match=f"model.trace cannot be used in a block.*{SIDE_BY_SIDE}"):
        with model.trace(PROMPT, **GREEDY):
            with model.trace(OTHER):
                logits = model.logits.save()


async def test_a_trace_in_an_async_block(model):
    with pytest.raises(CaptureError, match=f"another trace cannot be part of a block.*{SIDE_BY_SIDE}"):
        async with model.trace(PROMPT, **GREEDY):
            async with model.trace(OTHER):
                logits = model.logits.save()


def test_an_invoke_in_a_block(model):
    with pytest.raises(ValueError, match=SIDE_BY_SIDE):
        with model.trace(PROMPT, **GREEDY) as tracer:
            with tracer.invoke(OTHER):
                logits = model.logits.save()


def test_what_only_the_caller_has(model):
    with pytest.raises(OutsideBlockError, match=r"`tokenizer = model\.tokenizer`"):
        with model.trace(PROMPT, **GREEDY):
            text = save(model.tokenizer.decode(int(model.samples)))
    tokenizer = model.tokenizer
    with model.trace(PROMPT, **GREEDY) as tracer:
        text = save(tokenizer.decode(int(model.samples)))
    assert text == model.tokenizer.decode(tracer.result.outputs[0].token_ids[0])


async def test_another_model(model, other):
    with pytest.raises(ShippingError, match=r"'other', a VLLM.*belongs to another model(.|\n)*trace the other one"):
        async with model.trace(PROMPT, **GREEDY):
            logits = other.logits.save()
    with pytest.raises(ShippingError, match="'other', a VLLM"):
        model.run(PROMPT, lambda model, tracer: other.logits.save())


async def test_modules_of_another_model(model, other):
    layers = [other.model.layers[1]]
    with pytest.raises(ShippingError, match=r"'layers', a list \(layers\[0\] is an Envoy\).*another model"):
        async with model.trace(PROMPT, **GREEDY):
            hidden = layers[0].resid_post.save()
    attention = other.model.layers[1].self_attn
    for part in (attention.source, attention.source.attn_0, attention.heads, attention.heads[1]):
        with pytest.raises(ShippingError, match=r"'part'.*another model"):
            async with model.trace(PROMPT, **GREEDY):
                part.output


@pytest.mark.backends("vllm")
def test_modules_of_this_model_that_were_taken_above_the_block(model, hf):
    layers, attention = list(model.model.layers), model.model.layers[1].self_attn
    heads, second, call = attention.heads, attention.heads[1], attention.source.attn_0
    with model.trace(PROMPT, **GREEDY):
        stream = layers[0].resid_post.save()
        of_second = second.output.clone().save()
        of_all = heads.output.clone().save()
        whole = call.output.save()
    torch.testing.assert_close(stream, generation(hf, PROMPT, 1).streams[0], **CLOSE)
    assert torch.equal(of_all[:, 1], of_second)
    assert torch.equal(of_all.flatten(1), whole)


def test_the_tracer_of_another_trace(model):
    with model.trace(OTHER, **GREEDY) as first:
        top = model.logits.argmax(-1).save()
    with pytest.raises(ShippingError, match=r"'first', a Tracer.*another model or trace(.|\n)*as tracer:"):
        with model.trace(PROMPT, **GREEDY):
            for step in first.iter[:]:
                later = save(step)
    assert first.saves["top"] == top


def test_the_tracer_around_invokes_is_theirs(model):
    with model.trace(**GREEDY) as tracer:
        with tracer.invoke(PROMPT) as one:
            first = save([step for step in tracer.iter[:]] + [step for step in one.iter[:]])  # noqa: C416
        with tracer.invoke(OTHER) as two:
            second = save([step for step in two.iter[:]])  # noqa: C416
    assert (first, second) == ([0, 1], [0, 1])
    with pytest.raises(ShippingError, match="'one', a Tracer"):
        with model.trace(**GREEDY) as tracer:
            with tracer.invoke(PROMPT) as one:
                pass
            with tracer.invoke(OTHER):
                for step in one.iter[:]:
                    third = save(step)


def test_wrong_names(model):
    with pytest.raises(LocationError, match=r"did you mean model\.model\.layers\[1\]\.mlp\.output\?"):
        with model.trace(PROMPT, **GREEDY):
            hidden = model.model.layers[1].mlp.outptu.save()
    with pytest.raises(LocationError, match=r"did you mean model\.logits\?"):
        with model.trace(PROMPT, **GREEDY):
            logits = model.logit.save()
    with pytest.raises(LocationError, match=r"did you mean tracer\.iter\?"):
        with model.trace(PROMPT, **GREEDY) as tracer:
            for step in tracer.itre[:]:
                number = save(step)
    with pytest.raises(AttributeError, match=r"no attribute 'sav'(.|\n)*") as caught:
        with model.trace(PROMPT, **GREEDY):
            logits = model.logits.sav()
    assert caught.value.__notes__[0] == "did you mean .save()?"
    with model.trace(PROMPT, **GREEDY) as tracer:
        logits = model.logits.save()
    with pytest.raises(LocationError, match=r"a tracer has no 'reslut'; did you mean tracer\.result\?"):
        tracer.reslut
    with pytest.raises(LocationError, match=r"did you mean model\.logits\?"):
        model.logit
