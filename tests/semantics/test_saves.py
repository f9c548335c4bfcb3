# ruff: noqa: PT012, PT031, PERF401, RET504, SIM117 -- a block is what is assigned in it, and may well be several statements
"""What is saved comes home, or there is word of it."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch

from nnsight_async import CaptureError, ShippingError, save
from nnsight_async.testing.oracle import generation

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
PROMPT = [5, 17, 101, 9, 33, 250, 77]
GREEDY = {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True}


def test_a_list_from_outside_is_refused_and_what_the_message_says_works(model, hf):
    layers, hs = model.model.layers, []
    with pytest.raises(CaptureError, match=r"`hs = save\(\[\]\)`"), model.trace(PROMPT, **GREEDY):
        for layer in layers:
            hs.append(layer.resid_post.save())
    assert hs == []
    with model.trace(PROMPT, **GREEDY):
        hs = save([])
        for layer in layers:
            hs.append(layer.resid_post)
    torch.testing.assert_close(torch.stack(hs), torch.stack(generation(hf, PROMPT, 1).streams), **CLOSE)


async def test_an_attribute_from_outside_is_refused_and_what_the_message_says_works(model, hf):
    result = SimpleNamespace()
    with pytest.raises(CaptureError, match=r"`value = \.\.\.\.save\(\)`"):
        async with model.trace(PROMPT, **GREEDY):
            result.logits = model.logits.save()
    async with model.trace(PROMPT, **GREEDY):
        value = model.logits.save()
    result.logits = await value
    torch.testing.assert_close(result.logits, generation(hf, PROMPT, 1).logits, **CLOSE)


def test_of_an_invoke(model):
    found = {}
    with pytest.raises(CaptureError, match="'found' is bound outside"), model.trace(**GREEDY) as tracer:
        for name in ("a", "b"):
            with tracer.invoke(PROMPT):
                found[name] = model.logits.save()


def test_locations_take_saved_values(model):
    """They are no copies: what is assigned to them changes the model's own values."""
    mlp = model.model.layers[1].mlp
    with model.trace(PROMPT, **GREEDY) as tracer:
        mlp.output = (mlp.output * 2).save()
        mlp.output[0] = mlp.output[1].save()
        logits = model.logits.save()
    with model.trace(PROMPT, **GREEDY):
        doubled = mlp.output * 2
        doubled[0] = doubled[1]
        mlp.output = doubled
        expected = model.logits.save()
    assert torch.equal(logits, expected)
    assert tracer.saves["mlp.output * 2"].shape == (len(PROMPT), 128)


def grab(layer, module):
    hidden = layer.output[0].save()
    return hidden


def test_saves_without_a_name_that_replace_one_another(model):
    layers = model.model.layers
    with pytest.warns(UserWarning, match=r"bound to no name.*'layer\.output\[0\]'") as caught:
        with model.trace(PROMPT, **GREEDY):
            for layer in layers[1:3]:
                grab(layer, model)
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, grab.__code__.co_firstlineno + 1)]


@pytest.mark.backends("vllm")
def test_saves_without_a_name_have_that_of_their_text(model, hf):
    expected = generation(hf, PROMPT, 2)
    with warnings.catch_warnings(), model.trace(PROMPT, **GREEDY) as tracer:
        for _ in tracer.iter[:]:
            grab(model.model.layers[1], model)
            print((model.logits * 2).save().shape[0], save(model.logits * 3).shape[0], end="")
            tracer.save(model.samples + 0)
    torch.testing.assert_close(tracer.saves["model.logits * 3"], expected.logits[1:] * 3, **CLOSE)
    assert tracer.saves["model.samples + 0"].tolist() == [expected.ids[1:]]
    torch.testing.assert_close(tracer.saves["model.logits * 2"], expected.logits[1:] * 2, **CLOSE)
    assert tracer.saves["layer.output[0]"].shape == (1, 128)


def test_names_that_are_given(model, hf):
    expected = generation(hf, PROMPT, 1)

    def grab(layer, name):
        return layer.resid_post[-1].save(name)

    with model.trace(PROMPT, max_tokens=1, temperature=0.0) as tracer:
        for number, layer in enumerate(model.model.layers[:2]):
            layer.resid_post.save(f"layer {number}")
        grab(model.model.layers[2], "third")
        tracer.save(model.model.layers[3].resid_post, "fourth")
        top = model.logits.argmax(-1).save()
        model.samples.save(name="drawn")
    assert set(tracer.saves) == {"top", "layer 0", "layer 1", "third", "fourth", "drawn"}
    for number in range(2):
        torch.testing.assert_close(tracer.saves[f"layer {number}"], expected.streams[number], **CLOSE)
    torch.testing.assert_close(tracer.saves["third"], expected.streams[2][-1], **CLOSE)
    torch.testing.assert_close(tracer.saves["fourth"], expected.streams[3], **CLOSE)
    assert top.tolist() == tracer.saves["drawn"].flatten().tolist() == expected.ids


def test_names_that_are_given_in_a_probe(model, hf):
    def probe(model, tracer):
        stream = model.model.layers[1].resid_post
        stream.save("by position")
        again = stream.save(name="by keyword")
        assert again is stream
        tracer.save(stream)
        text = tracer.save("a text")

    saves = model.run(PROMPT, probe, max_tokens=1, temperature=0.0).result().saves
    assert set(saves) == {"by position", "by keyword", "stream", "text"}
    expected = generation(hf, PROMPT, 1).streams[1]
    for name in ("by position", "by keyword", "stream"):
        torch.testing.assert_close(saves[name], expected, **CLOSE)
    assert saves["text"] == "a text"


async def test_names_that_are_given_in_an_async_trace(model, hf):
    async with model.trace(PROMPT, **GREEDY) as tracer:
        for _ in tracer.iter[:]:
            model.logits[0].save("logits of a step")
    expected = generation(hf, PROMPT, 2).logits
    values = [value async for value in tracer.saves["logits of a step"].stream()]
    torch.testing.assert_close(torch.stack(values), expected, **CLOSE)


def test_a_name_is_a_string(model):
    with pytest.raises(TypeError, match="has a printable string as its name, not tensor"):
        with model.trace(PROMPT, **GREEDY):
            model.logits.save(model.samples)


def test_a_variable_that_is_assigned_what_has_another_name(model):
    with pytest.warns(UserWarning, match=r"uses 'hidden', which the block .* does not save"):
        with model.trace(PROMPT, **GREEDY) as tracer:
            hidden = model.model.layers[1].resid_post.save("the stream")
    with pytest.raises(UnboundLocalError, match="'hidden'"):
        print(hidden)
    assert list(tracer.saves) == ["the stream"]


def test_a_save_keeps_what_the_value_is_at_that_line(model, hf):
    expected = generation(hf, PROMPT, 2)
    changed = generation(hf, PROMPT, 1, {1: lambda hidden: hidden + 100})
    with model.trace(PROMPT, **GREEDY) as tracer:
        number, pair, values = save(1), None, save([])
        before = model.model.layers[1].resid_post
        before.save()
        before += 100
        number += 100
        after = before.save()
        values.append(number)
        values.append(2)
        logits = model.logits.save()
        pair = save((logits, logits[0]))
        top = model.logits
        same = top.save()
        top += 100
    torch.testing.assert_close(before, after - 100, **CLOSE)
    torch.testing.assert_close(before, expected.streams[1][: len(PROMPT)], **CLOSE)
    torch.testing.assert_close(logits, changed.logits, **CLOSE)
    torch.testing.assert_close(same, logits)
    assert torch.equal(pair[0][0], pair[1])
    assert (number, values) == (1, [101, 2])


def test_a_name_that_was_not_saved(model):
    """As in the quickstart: it is warned of before anything runs, and then unbound as any name is."""
    with pytest.warns(UserWarning, match=r"uses 'hidden', which the block .* does not save"):
        with model.trace(PROMPT, **GREEDY):
            hidden = model.model.layers[1].output[0]
            logits = model.logits.save()
    with pytest.raises(UnboundLocalError, match="'hidden'"):
        print(hidden)
    assert logits.shape[0] == 1


def test_what_is_done_in_later_steps_to_tensors_in_a_saved_container(model, hf):
    expected = generation(hf, PROMPT, 3)
    with model.trace(PROMPT, max_tokens=3, temperature=0.0, ignore_eos=True) as tracer:
        total = torch.zeros(128)
        found = save({"sum": total, "highest": torch.full((2,), -1.0)})
        logits, rows = save([]), save([])
        for step in tracer.iter[:]:
            stream = model.model.layers[1].resid_post
            total += stream.sum(0)
            torch.maximum(found["highest"], torch.full((2,), float(step)), out=found["highest"])
            rows.append(stream[-1] * 1)
            logits.append(model.logits[0])
        mean = torch.stack(rows).mean(0)
        for row in rows:
            row -= mean
    torch.testing.assert_close(found["sum"], expected.streams[1].sum(0), **CLOSE)
    assert found["highest"].tolist() == [2, 2]
    last = expected.streams[1][len(PROMPT) - 1 :]
    torch.testing.assert_close(torch.stack(rows), last - last.mean(0), **CLOSE)
    torch.testing.assert_close(torch.stack(logits), expected.logits, **CLOSE)


async def test_a_stream_of_what_is_changed_in_place(model, hf):
    streams = generation(hf, PROMPT, 3).streams[1]
    async with model.trace(PROMPT, max_tokens=3, temperature=0.0, ignore_eos=True) as tracer:
        found = save([torch.zeros(128)])
        for _ in tracer.iter[:]:
            found[0] += model.model.layers[1].resid_post.sum(0)
    values = [value async for (value,) in found.stream()]
    assert len(values) == 3
    for step, value in enumerate(values):
        torch.testing.assert_close(value, streams[: len(PROMPT) + step].sum(0), **CLOSE)


def test_what_is_put_into_an_object_from_outside_is_warned_of_and_what_the_message_says_works(model, hf):
    tops, count = [0.0], 0
    with pytest.warns(UserWarning, match=r"(Write `(tops|count)\.save\(\)`)") as caught:
        with model.trace(PROMPT, **GREEDY) as tracer:
            for _ in tracer.iter[:]:
                tops.append(float(model.logits.max()))
                count += 1
    assert len(caught) == 2
    assert (tops, count) == ([0.0], 0)
    with model.trace(PROMPT, **GREEDY) as tracer:
        for _ in tracer.iter[:]:
            tops.append(float(model.logits.max()))
            count += 1
        tops.save()
        count.save()
    assert count == 2
    assert tops == pytest.approx([0.0, *generation(hf, PROMPT, 2).logits.max(-1).values.tolist()], abs=1e-4)


def test_a_name_that_is_saved_twice_in_a_step_has_the_last_value(model, hf):
    with model.trace(PROMPT, max_tokens=1) as tracer:
        for layer in model.model.layers[:3]:
            layer.resid_post.save("given")
            variable = layer.resid_post.save()
    expected = generation(hf, PROMPT, 1).streams[2]
    torch.testing.assert_close(tracer.saves["given"], expected, **CLOSE)
    torch.testing.assert_close(variable, expected, **CLOSE)


async def test_a_saved_of_another_block_is_to_be_awaited(model, hf):
    async with model.trace(PROMPT, **GREEDY) as tracer:
        for _ in tracer.iter[:]:
            first = model.logits.save()
    with pytest.raises(ShippingError, match=r"uses 'first', a Saved(.|\n)*await it above the block"):
        async with model.trace(PROMPT, **GREEDY):
            difference = (model.logits - first).save()
    first = await first
    async with model.trace(PROMPT, max_tokens=1):
        difference = (model.logits - first).save()
    logits = generation(hf, PROMPT, 2).logits
    torch.testing.assert_close((await difference)[0], logits[0] - logits[1], **CLOSE)


def test_private_names_of_a_method(model, hf):
    class Experiment:
        def run(self):
            self.__scale = 2
            with model.trace(PROMPT, max_tokens=1):
                __doubled = (model.logits * self.__scale).save()
            return __doubled

    torch.testing.assert_close(Experiment().run(), generation(hf, PROMPT, 1).logits * 2, **CLOSE)
