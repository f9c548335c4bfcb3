"""Invokes of one trace that wait for each other, and use each other's values."""

from __future__ import annotations

import pytest
import torch

from nnsight_async import GenerationEndedError, OutsideBlockError
from nnsight_async.testing.oracle import generation

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
CLEAN, CORRUPTED = [5, 17, 101, 9, 33], [7, 8, 101, 9, 33]


def patched(hf, layer, row):
    source = generation(hf, CLEAN, 1).streams[layer][row]

    def edit(hidden):
        hidden = hidden.clone()
        hidden[0, row] = source
        return hidden

    return generation(hf, CORRUPTED, 1, {layer: edit})


@pytest.mark.parametrize("first", [CLEAN, CORRUPTED], ids=["giver first", "taker first"])
def test_a_value_read_in_one_is_written_in_another(model, hf, first):
    """At the same place in the same forward pass, whichever of the two comes first."""
    with model.trace() as tracer:
        barrier = tracer.barrier(2)
        if first is CORRUPTED:
            with tracer.invoke(CORRUPTED):
                barrier()
                model.model.layers[1].resid_post[2] = clean[2]  # noqa: F821  bound in the other block
                logits = model.logits.save()
        with tracer.invoke(CLEAN):
            clean = model.model.layers[1].resid_post
            barrier()
        if first is CLEAN:
            with tracer.invoke(CORRUPTED):
                barrier()
                model.model.layers[1].resid_post[2] = clean[2]
                logits = model.logits.save()
    torch.testing.assert_close(logits, patched(hf, 1, 2).logits, **CLOSE)


def test_prompts_of_unequal_length_share_a_later_layer(model, hf):
    with model.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke([*CLEAN, 300, 301]):
            longer = model.model.layers[0].resid_post[-1]
            barrier()
        with tracer.invoke(CORRUPTED):
            barrier()
            model.model.layers[2].resid_post[-1] += longer
            stream = model.model.layers[2].resid_post.save()
    given = generation(hf, [*CLEAN, 300, 301], 1).streams[0][-1]
    expected = generation(hf, CORRUPTED, 1).streams[2].clone()
    expected[-1] += given
    torch.testing.assert_close(stream, expected, **CLOSE)


def test_gradients_reach_the_other_prompt(model, hf):
    with model.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(CLEAN):
            given = model.model.layers[0].resid_post
            barrier()
        with tracer.invoke(CORRUPTED):
            barrier()
            model.model.layers[2].resid_post[-1] += given.sum(0)
            model.logits.sum().backward()
            gradient = given.grad.save()
    assert gradient.shape == (len(CLEAN), hf.config.hidden_size)
    assert gradient.abs().sum() > 0
    assert torch.equal(gradient[0], gradient[-1])


def test_three_times_and_in_every_step(model):
    with model.generate(max_tokens=3, ignore_eos=True) as tracer:
        barrier = tracer.barrier(3)
        for number in range(3):
            with tracer.invoke(CLEAN[number:]):
                mine = number + 1
                for _ in tracer.iter[:]:
                    hidden = model.model.layers[1].resid_post
                    barrier()
                    rows = hidden.shape[0].save()
    assert rows == [1, 1, 1]


def test_who_waits_for_nobody_is_told(model):
    with pytest.raises(GenerationEndedError, match=r"barrier, which 1 of 2.*call it"), model.trace() as tracer:  # noqa: PT012
        barrier = tracer.barrier(2)
        with tracer.invoke(CLEAN):
            barrier()
            never = model.logits.save()
        with tracer.invoke(CORRUPTED):
            logits = model.logits.save()


def test_a_barrier_for_more_invokes_than_there_are(model):
    words = r"barrier\(3\) waits for 3 invokes, and this trace has 2"
    with pytest.raises(ValueError, match=words), model.trace() as tracer:  # noqa: PT012
        barrier = tracer.barrier(3)
        for prompt in (CLEAN, CORRUPTED):
            with tracer.invoke(prompt):
                barrier()
                never = model.logits.save()


def test_sequences_of_an_invoke_come_to_a_barrier_each(model):
    with model.trace(n=2, temperature=1.0, seed=1) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(CLEAN):
            barrier()
            logits = model.logits.save()
    assert torch.equal(*logits)


def test_a_barrier_outside_of_blocks(model):
    with pytest.raises(OutsideBlockError, match="in the blocks of invokes"), model.trace() as tracer:  # noqa: PT012
        barrier = tracer.barrier(2)
        barrier()
    with pytest.raises(ValueError, match="number of invokes"), model.trace() as tracer:
        tracer.barrier(0)
