# ruff: noqa: SIM117 -- a block is what is assigned in it, and may well be several statements
"""What can be saved, and what it is when it has come home."""

from __future__ import annotations

import asyncio

import pytest
import torch

from nnsight_async import SaveError, save
from nnsight_async.testing.oracle import generation

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
PROMPT = [5, 17, 101, 9, 33, 250, 77]
STEPS = 30
GREEDY = {"max_tokens": 1, "temperature": 0.0}

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_a_tensor_keeps_its_dtype(model, hf, dtype):
    with model.trace(PROMPT, **GREEDY):
        stream = model.model.layers[1].resid_post.save()
        converted = stream.to(dtype).save()
    assert converted.dtype == dtype
    assert converted.device.type == "cpu"
    assert converted.shape == (len(PROMPT), hf.config.hidden_size)
    assert torch.equal(converted.to(torch.complex128), stream.to(dtype).to(torch.complex128))
    torch.testing.assert_close(stream, generation(hf, PROMPT, 1).streams[1], **CLOSE)


LAYOUTS = {
    "a scalar": lambda t: t.sum(),
    "nothing in it": lambda t: t[:0],
    "a transpose": lambda t: t.T,
    "a slice with gaps": lambda t: t[::2, 1::3],
    "an expanded row": lambda t: t[:1].expand(5, -1),
    "a flip": lambda t: t.flip(0),
    "four dimensions": lambda t: t.reshape(1, len(PROMPT), 4, 32),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_tensor_keeps_its_shape_however_it_lies_in_memory(model, layout):
    with model.trace(PROMPT, **GREEDY):
        stream = model.model.layers[1].resid_post.save()
        arranged = layout(stream).save()
    assert arranged.shape == layout(stream).shape
    torch.testing.assert_close(arranged, layout(stream), rtol=1e-6, atol=1e-5)


def test_what_came_home_is_the_callers_to_change(model, hf):
    with model.trace(PROMPT, **GREEDY):
        first = model.logits.save()
        second = model.logits.save()
    first += 1
    first.requires_grad_().sum().backward()
    torch.testing.assert_close(second, generation(hf, PROMPT, 1).logits, **CLOSE)
    torch.testing.assert_close(first.detach(), second + 1)


PLAIN = {
    "a number": 7,
    "a large number": 1 << 62,
    "a real number": 0.1,
    "no number": float("inf"),
    "yes": True,
    "none": None,
    "a text": "caf\u00e9 \N{SNOWMAN}",
    "bytes": b"\x00\xff",
    "a list": [1, [2.5, "three"], []],
    "a tuple": (1, (2,), ()),
    "a dict": {"a": 1, "b": {"c": [None, False]}},
    "keys that are no texts": {1: "one", (2, 3): "pair"},
}


@pytest.mark.parametrize("value", PLAIN.values(), ids=PLAIN)
def test_plain_values_come_home_as_they_are(model, value):
    with model.trace(PROMPT, **GREEDY):
        found = save(value)
    assert found == value
    assert type(found) is type(value)


def test_tensors_in_containers(model, hf):
    expected = generation(hf, PROMPT, 1)
    with model.trace(PROMPT, **GREEDY):
        layers = model.model.layers
        found = save({"streams": [layer.resid_post for layer in layers], "top": (model.logits.argmax(-1), "id")})
    for got, wanted in zip(found["streams"], expected.streams, strict=True):
        torch.testing.assert_close(got, wanted, **CLOSE)
    assert found["top"][0].tolist() == expected.ids
    assert found["top"][1] == "id"


REFUSED = {
    "an object": lambda model: object(),
    "a function": lambda model: len,
    "a set": lambda model: {1, 2},
    "an object deep inside": lambda model: [{"a": (1, object())}],
    "a module of the model": lambda model: model.model.layers[0],
}


@pytest.mark.parametrize("made", REFUSED.values(), ids=REFUSED)
def test_other_values_are_refused_at_their_line(model, made):
    with pytest.raises(SaveError, match=r"'kept' holds a .*, which cannot be saved; save tensors, numbers, strings"):
        with model.trace(PROMPT, **GREEDY):
            save(made(model), "kept")


@pytest.mark.backends("vllm")
async def test_prints_of_blocks_that_run_at_once_say_whose_they_are(model, capsys):
    async def speaks(number: int) -> None:
        async with model.trace(PROMPT, max_tokens=STEPS, temperature=0.0, ignore_eos=True) as tracer:
            for step in tracer.iter[:]:
                print("run", number, "step", step)
        await tracer.result

    await speaks(7)
    alone = capsys.readouterr().out.splitlines()
    assert alone == [f"run 7 step {step}" for step in range(STEPS)]

    await asyncio.gather(*map(speaks, range(3)))
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line[line.rindex("run ") :] for line in lines) == sorted(
        f"run {number} step {step}" for number in range(3) for step in range(STEPS)
    )
    prefixes = [{line[: line.rindex("run ")] for line in lines if f"run {number} " in line} for number in range(3)]
    several = [found - {""} for found in prefixes]
    assert all(len(found) <= 1 for found in several)
    assert len(set().union(*several)) >= 2
