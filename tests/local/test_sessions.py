"""Several traces, of which later ones use what earlier ones have bound."""

from __future__ import annotations

import asyncio
import warnings

import pytest
import torch

from nnsight_async import SurfaceError, TransformersModel, save
from nnsight_async.runs.saved import Saved
from nnsight_async.testing.oracle import generation

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
CLEAN, CORRUPTED, OTHER = [5, 17, 101, 9, 33], [7, 8, 101, 9, 33], [300, 41, 8]
GREEDY = {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True}


def patched(hf, clean, corrupted, layer, row):
    source = generation(hf, clean, 1).streams[layer][row]

    def edit(hidden):
        hidden = hidden.clone()
        hidden[0, row] = source
        return hidden

    return generation(hf, corrupted, 1, {layer: edit}).logits


def test_a_later_trace_writes_what_an_earlier_one_has_read(model, hf):
    with model.session():
        with model.trace(CLEAN):
            clean = model.model.layers[1].resid_post[2]
        assert type(clean) is torch.Tensor
        with model.trace(CORRUPTED):
            model.model.layers[1].resid_post[2] = clean
            logits = model.logits.save()
    torch.testing.assert_close(logits, patched(hf, CLEAN, CORRUPTED, 1, 2), **CLOSE)
    torch.testing.assert_close(clean, generation(hf, CLEAN, 1).streams[1][2], **CLOSE)


async def test_in_async_mode_names_hold_values_too(model, hf):
    async with model.session():
        async with model.trace(CLEAN):
            clean = model.model.layers[1].resid_post[2]
        async with model.trace(CORRUPTED) as tracer:
            model.model.layers[1].resid_post[2] = clean
            logits = model.logits.save()
    torch.testing.assert_close(logits, patched(hf, CLEAN, CORRUPTED, 1, 2), **CLOSE)
    assert (await tracer.result).saves["logits"] is logits
    async with model.trace(CLEAN):
        logits = model.logits.save()
    assert isinstance(logits, Saved)
    await logits


async def test_sessions_of_tasks_are_apart(model, hf):
    async def patch(corrupted: list[int]) -> torch.Tensor:
        async with model.session():
            async with model.trace(CLEAN):
                clean = model.model.layers[1].resid_post[0]
            await asyncio.sleep(0)
            async with model.trace(corrupted):
                model.model.layers[1].resid_post[0] = clean
                logits = model.logits.save()
        return logits

    async def plain() -> object:
        async with model.trace(CLEAN):
            logits = model.logits.save()
        return logits  # noqa: RET504  bound by the trace

    first, second, saved = await asyncio.gather(patch(CORRUPTED), patch(OTHER), plain())
    torch.testing.assert_close(first, patched(hf, CLEAN, CORRUPTED, 1, 0), **CLOSE)
    torch.testing.assert_close(second, patched(hf, CLEAN, OTHER, 1, 0), **CLOSE)
    assert isinstance(saved, Saved)
    await saved


def test_what_a_loop_of_traces_carries_along(model, hf):
    """A name of the loop, one that is added to, and a list."""
    total, found = torch.zeros(128), []
    with model.session():
        for prompt in (CLEAN, CORRUPTED, OTHER):
            with model.trace(prompt):
                last = model.model.layers[0].resid_post[-1]
                total = total + last
                found = [*found, last]
    rows = [generation(hf, prompt, 1).streams[0][-1] for prompt in (CLEAN, CORRUPTED, OTHER)]
    torch.testing.assert_close(total, torch.stack(rows).sum(0), **CLOSE)
    torch.testing.assert_close(torch.stack(found), torch.stack(rows), **CLOSE)


def test_values_at_the_end_of_the_block_are_carried_and_saves_as_they_were(model):
    with model.session():
        with model.generate(CLEAN, **GREEDY) as tracer:
            first, count = None, 0
            for step in tracer.iter[:]:
                drawn = model.samples.save()
                count += 1
                if step == 1:
                    first = drawn
            after = count * 10
            kept = count.save()
            count = -1
        with model.generate(CLEAN, **GREEDY) as second:
            for step in second.iter[:]:
                seen = step
                if step == 1:
                    second.stop()
    assert (count, after, kept, seen) == (-1, 30, 3, 1)
    assert int(first) == tracer.result.outputs[0].token_ids[1]
    assert not hasattr(first, "grad_fn") or first.grad_fn is None


def test_invokes_give_lists(model, hf):
    with model.session():
        with model.trace() as tracer:
            for prompt in (CLEAN, CORRUPTED):
                with tracer.invoke(prompt):
                    last = model.model.layers[2].resid_post[-1]
        with model.trace(OTHER):
            model.model.layers[2].resid_post[-1] = last[0] - last[1]
            stream = model.model.layers[2].resid_post.save()
    rows = [generation(hf, prompt, 1).streams[2][-1] for prompt in (CLEAN, CORRUPTED)]
    torch.testing.assert_close(stream[-1], rows[0] - rows[1], **CLOSE)


async def test_invokes_in_async_mode(model, hf):
    async with model.session():
        async with model.trace() as tracer:
            with tracer.invoke(CLEAN):
                one = model.model.layers[2].resid_post[-1]
            with tracer.invoke(CORRUPTED):
                other = model.model.layers[2].resid_post[-1]
        difference = one - other
    rows = [generation(hf, prompt, 1).streams[2][-1] for prompt in (CLEAN, CORRUPTED)]
    torch.testing.assert_close(difference, rows[0] - rows[1], **CLOSE)


def test_an_error_ends_the_session_and_the_next_trace_is_a_plain_one(model):
    reached = False
    with pytest.raises(ZeroDivisionError), model.session():  # noqa: PT012
        with model.trace(CLEAN):
            hidden = model.model.layers[1].output / (1 // 0)
        reached = True
    assert not reached
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with model.trace(CLEAN):
            forgotten = model.logits
        with pytest.raises(UnboundLocalError):
            print(forgotten)
    assert "does not save" in str(caught[0].message)


async def test_an_error_in_async_mode_and_a_name_that_was_not_bound(model):
    with pytest.raises(ZeroDivisionError):
        async with model.session(), model.trace(CLEAN):
            1 // 0
    async with model.session():
        async with model.trace(CLEAN):
            if model.logits.isnan().any():
                absent = 1
        with pytest.raises(UnboundLocalError):
            print(absent)


def test_what_cannot_be_saved_stays_in_the_block(model):
    with model.session():
        with model.trace(CLEAN):
            layer = model.model.layers[1]
            hidden = layer.resid_post
        with model.trace(CLEAN):
            layer = model.model.layers[1]
            same = torch.equal(layer.resid_post, hidden).save()
    assert same


def test_a_scan_in_a_session(model):
    with model.session():
        with model.scan(CLEAN):
            shaped = model.model.layers[1].mlp.gate_proj.output
        with model.trace(CLEAN):
            gate = torch.zeros(shaped.shape)
            model.model.layers[1].mlp.gate_proj.output = gate
            out = model.model.layers[1].mlp.output.save()
    assert shaped.is_meta
    assert out.abs().max() == 0


def test_no_gradient_reaches_from_one_trace_to_another(model):
    with model.session():
        with model.trace(CLEAN, gradients=True):
            early = model.model.layers[0].resid_post
            loss = model.logits.sum()
        with model.trace(CLEAN):
            late = model.model.layers[0].resid_post
            model.logits.sum().backward()
            gradient = late.grad
    assert not early.requires_grad
    assert not loss.requires_grad
    assert gradient.abs().sum() > 0


async def test_which_form_is_for_which_model(model, llama):
    with pytest.raises(SurfaceError, match=r"async with model\.session"), model.session():
        pass
    with pytest.raises(SurfaceError, match=r"write `with model\.session"):
        async with TransformersModel(llama).session():
            pass
    session = model.session()
    async with session:
        with pytest.raises(RuntimeError, match="is open"):
            async with session:
                pass


def test_traces_of_another_model_are_not_part_of_it(model, llama):
    with TransformersModel(llama, mode="async") as other, model.session():

        async def traced() -> object:
            async with other.trace(CLEAN):
                logits = save(other.logits)
            return await logits if isinstance(logits, Saved) else "a value"

        assert isinstance(asyncio.run(traced()), torch.Tensor)
