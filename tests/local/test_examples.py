"""The examples that take gradients, against transformers in float32."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from nnsight_async import TransformersModel
from nnsight_async.testing.vision import tiny_vision_checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples"
CLOSE = {"rtol": 1e-3, "atol": 1e-4}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def streams(hf: Any, ids: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The streams after the layers, parts of the graph, and the logits of the last token."""
    found: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda module, args, output: found.append(output)) for layer in hf.model.layers
    ]
    logits = hf(torch.tensor([ids])).logits[0, -1]
    for hook in hooks:
        hook.remove()
    return found, logits


def test_attribution_patching_is_the_first_order_of_patching(model: Any, hf: Any, example: Any) -> None:
    clean, corrupted = "The boat was red", "The boat was big"
    grid = example("attribution_patching").main(model, clean, corrupted)

    good, right = streams(hf, model.tokenizer(clean).input_ids)
    bad, wrong = streams(hf, model.tokenizer(corrupted).input_ids)
    assert right.argmax() != wrong.argmax()
    gradients = torch.autograd.grad(wrong[right.argmax()] - wrong[wrong.argmax()], bad)
    last = min(good[0].shape[1], bad[0].shape[1])
    for number, (one, other, gradient) in enumerate(zip(good, bad, gradients, strict=True)):
        effect = ((one[0, -last:] - other[0, -last:]) * gradient[0, -last:]).sum(-1)
        torch.testing.assert_close(grid[number], effect, **CLOSE)


def test_a_small_step_of_patching_changes_the_logits_by_that_much(model: Any, hf: Any, example: Any) -> None:
    """What the gradients stand for: a hundredth of the patch has a hundredth of the effect."""
    clean, corrupted = "The boat was red", "The boat was big"
    grid = example("attribution_patching").main(model, clean, corrupted)
    good, right = streams(hf, model.tokenizer(clean).input_ids)
    _, wrong = streams(hf, model.tokenizer(corrupted).input_ids)
    wanted, other = int(right.argmax()), int(wrong.argmax())
    for layer in range(len(grid)):
        with model.trace(corrupted):
            model.model.layers[layer].resid_post[-1].lerp_(good[layer][0, -1].detach(), 0.01)
            logits = model.logits.save()
        moved = logits[0, wanted] - logits[0, other] - (wrong[wanted] - wrong[other])
        assert moved.item() / 0.01 == pytest.approx(float(grid[layer, -1]), rel=0.05, abs=0.02)


def test_the_effects_of_patches_are_those_of_autograd(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """On a LLaVA of random weights, with its processor, against transformers."""
    module = example("image_patches")
    folder = tiny_vision_checkpoint()
    with TransformersModel(folder) as model:
        grid, seen, hidden = module.main(model)

    hf, processor = AutoModelForImageTextToText.from_pretrained(folder).eval(), AutoProcessor.from_pretrained(folder)
    text = f"USER: {processor.image_token}\n{module.QUESTION} ASSISTANT:"
    inputs = processor(images=module.picture(""), text=text, return_tensors="pt")
    change: dict[int, float] = {}
    features: list[torch.Tensor] = []

    def keep(layer: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        scale = torch.ones(output.shape[-2], 1)
        for row, factor in change.items():
            scale[row] = factor
        features.append(output.detach() * scale)
        return features[-1].requires_grad_()

    hf.model.multi_modal_projector.register_forward_hook(keep)
    logits = hf(**inputs).logits[0, -1]
    (gradient,) = torch.autograd.grad(logits.max(), features[-1])
    effects = (features[-1] * gradient).sum(-1).flatten()
    assert grid.shape == (4, 4)
    torch.testing.assert_close(grid.flatten(), effects.detach(), **CLOSE)
    change[int(effects.argmax())] = 0.0
    without = hf(**inputs).logits[0, -1, logits.argmax()]
    assert (seen, hidden) == pytest.approx((logits.max().item(), without.item()), abs=1e-4)
    assert hidden != pytest.approx(seen, abs=1e-4)
    assert len(capsys.readouterr().out.splitlines()) == 6


def test_integrated_gradients_add_up_to_the_difference(model: Any, hf: Any, example: Any) -> None:
    prompt = "The boat was red"
    contributions, difference = example("integrated_gradients").main(model, prompt, steps=64)
    with torch.no_grad():
        ids = torch.tensor([model.tokenizer(prompt).input_ids])
        embedded = hf.model.embed_tokens(ids)
        neutral = hf.model.embed_tokens.weight.mean(0).expand_as(embedded)
        whole = hf(inputs_embeds=embedded).logits[0, -1]
        none = hf(inputs_embeds=neutral.clone()).logits[0, -1]
    answer = whole.argmax()
    assert difference == pytest.approx(float(whole[answer] - none[answer]), abs=1e-3)
    assert float(contributions.sum()) == pytest.approx(difference, rel=0.05)
