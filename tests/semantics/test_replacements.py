# ruff: noqa: PT012, SIM117 -- a block is what is assigned in it, and may well be several statements
"""What a value may be replaced by: its rows and width, in any dtype that converts safely, from wherever it is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from nnsight_async import ShapeError, save
from nnsight_async.testing.oracle import generation

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
PROMPT = [5, 17, 101, 9, 33, 250, 77]
GREEDY = {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True}

SAFE = {
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "bool": torch.bool,
}


@pytest.mark.parametrize("dtype", SAFE.values(), ids=SAFE)
def test_a_dtype_that_converts(model, hf, dtype):
    values = torch.arange(len(PROMPT) * 128).reshape(len(PROMPT), 128).remainder(3).to(dtype)

    def given(hidden: torch.Tensor) -> torch.Tensor:
        return values.float().expand_as(hidden).clone() if hidden.shape[-2] == len(PROMPT) else hidden

    with model.trace(PROMPT, max_tokens=1, temperature=0.0):
        model.model.layers[1].resid_post = values
        read_again = model.model.layers[1].resid_post.save()
        logits = model.logits.save()
    assert read_again.dtype == torch.float32
    assert torch.equal(read_again, values.float())
    torch.testing.assert_close(logits, generation(hf, PROMPT, 1, {1: given}).logits, **CLOSE)


REFUSED = {
    "a complex dtype": (lambda rows: torch.zeros(rows, 128, dtype=torch.complex64), r"complex64 does not convert"),
    "rows of the step before": (
        lambda rows: torch.zeros(rows + 1, 128),
        r"owns (?P<own>\d) rows? of it.*\((?P=own), 128\).*128\)",
    ),
    "no rows": (lambda rows: torch.zeros(128), r"has shape \(\d, 128\); the one given has \(128,\)"),
    "another width": (lambda rows: torch.zeros(rows, 64), r"has shape \(\d, 128\); the one given has \(\d, 64\)"),
    "a batch dimension": (lambda rows: torch.zeros(1, rows, 128), r"the one given has \(1, \d, 128\)"),
    "no data": (lambda rows: torch.zeros(rows, 128, device="meta"), "a dense tensor with data"),
    "not dense": (lambda rows: torch.zeros(rows, 128).to_sparse(), "a dense tensor with data"),
    "a number": (lambda rows: 0.0, "takes a tensor of shape"),
    "nothing": (lambda rows: None, "takes a tensor of shape"),
    "a tuple": (lambda rows: (torch.zeros(rows, 128),), "takes a tensor of shape"),
}


@pytest.mark.parametrize(("made", "words"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("step", [0, 1])
def test_what_does_not_fit_is_a_value_error_at_its_line(model, made, words, step):
    """It names the location, the rows that the request owns, and what was given."""
    with pytest.raises(ValueError, match=r"model\.layers\[1\]\.mlp\.output(.|\n)*" + words) as caught:
        with model.trace(PROMPT, **GREEDY) as tracer:
            for _ in tracer.iter[step]:
                model.model.layers[1].mlp.output = made(model.model.layers[1].input.shape[0])
    assert isinstance(caught.value, ShapeError)
    assert any(f"step {step}" in note for note in caught.value.__notes__)


def test_an_error_of_a_replacement_can_be_handled_and_leaves_the_value(model, hf):
    with model.trace(PROMPT, **GREEDY) as tracer:
        for step in tracer.iter[:]:
            try:
                model.model.layers[1].mlp.output = torch.zeros(99, 128)
            except ValueError:
                refused = save(step)
            logits = model.logits.save()
    expected = generation(hf, PROMPT, 3)
    assert refused == 2
    assert list(tracer.result.outputs[0].token_ids) == expected.ids
    torch.testing.assert_close(logits[0], expected.logits[-1], **CLOSE)


def test_all_arguments_of_a_module(model, hf):
    """`.inputs` is `(args, kwargs)`; assigned as a whole, or changed in place."""
    vector = torch.randn(128, generator=torch.Generator().manual_seed(2))
    mlp = model.model.layers[1].mlp
    with model.trace(PROMPT, max_tokens=1, temperature=0.0):
        args, kwargs = mlp.inputs
        given = args[0].save()
        number = save(len(args) + len(kwargs))
        mlp.inputs = ((args[0] + vector,), {})
        replaced = model.logits.save()
    with model.trace(PROMPT, max_tokens=1, temperature=0.0):
        mlp.inputs[0][0][:] += vector
        in_place = model.logits.save()

    seen: dict[str, Any] = {}

    def add(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        seen["input"] = args[0][0]
        return (args[0] + vector,)

    handle = hf.model.layers[1].mlp.register_forward_pre_hook(add)
    with torch.no_grad():
        expected = hf(torch.tensor([PROMPT])).logits[:, -1]
    handle.remove()
    assert number == 1
    torch.testing.assert_close(given, seen["input"], **CLOSE)
    torch.testing.assert_close(replaced, expected, **CLOSE)
    torch.testing.assert_close(in_place, expected, **CLOSE)


def test_what_was_read_stays_and_what_was_changed_lands(model, hf):
    """A reading kept past its line has the value of then; each reading has the changes made so far."""
    layer = model.model.layers[1]
    with model.trace(PROMPT, max_tokens=1, temperature=0.0):
        before = layer.mlp.output
        layer.mlp.output[:] *= 2
        doubled = layer.mlp.output
        layer.mlp.output = doubled + before
        after = layer.mlp.output
        logits = model.logits.save()
        readings = save([before, doubled, after])

    seen: dict[str, torch.Tensor] = {}

    def triple(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        seen["output"] = output[0]
        return output * 3

    handle = hf.model.layers[1].mlp.register_forward_hook(triple)
    with torch.no_grad():
        expected = hf(torch.tensor([PROMPT])).logits[:, -1]
    handle.remove()
    for times, reading in enumerate(readings, 1):
        torch.testing.assert_close(reading, seen["output"] * times, **CLOSE)
    torch.testing.assert_close(logits, expected, **CLOSE)


async def test_skip_in_a_step_that_others_share(model, hf):
    """Who skips a module gets what it gave; who does not, what the module computes."""

    async def last_logits(number: float | None) -> torch.Tensor:
        async with model.trace(PROMPT, **GREEDY) as tracer:
            for _ in tracer.iter[:]:
                if number is not None:
                    mlp = model.model.layers[1].mlp
                    mlp.skip(torch.full_like(mlp.input, number))
                logits = model.logits.save()
        return (await logits)[0]

    numbers = [None, 0.0, None, 1.0]
    found = await asyncio.gather(*map(last_logits, numbers))
    for number, got in zip(numbers, found, strict=True):
        hook = None
        if number is not None:
            hook = hf.model.layers[1].mlp.register_forward_hook(
                lambda module, args, output, number=number: torch.full_like(output, number)
            )
        expected = generation(hf, PROMPT, 3).logits[-1]
        if hook is not None:
            hook.remove()
        torch.testing.assert_close(got, expected, **CLOSE)
