"""A model that PEFT has wrapped: its adapters are in what a block reads, and can be read and changed themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from nnsight_async import TransformersModel
from nnsight_async.testing import hf_model

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
PROMPT, SHORT = [5, 17, 101, 9, 33], [300, 41, 8]


@pytest.fixture(scope="module")
def adapted() -> Any:
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(hf_model("llama"), config).eval()


@pytest.fixture(scope="module")
def model(adapted: Any) -> Iterator[TransformersModel]:
    with TransformersModel(adapted) as model:
        yield model


def forward(adapted: Any, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The stream after a layer, `[tokens, width]`, and the logits of the last token, `[1, vocab]`."""
    found: list[torch.Tensor] = []
    layer = adapted.base_model.model.model.layers[1]
    hook = layer.register_forward_hook(lambda module, args, output: found.append(output[0]))
    with torch.no_grad():
        logits = adapted(torch.tensor([ids])).logits[:, -1]
    hook.remove()
    return found[0], logits


def test_values_with_the_adapter_in_them(model: Any, adapted: Any) -> None:
    layers = model.base_model.model.model.layers
    with model.trace() as tracer:
        for prompt in (PROMPT, SHORT):
            with tracer.invoke(prompt):
                stream = layers[1].resid_post.save()
                logits = model.logits.save()
    for number, prompt in enumerate((PROMPT, SHORT)):
        expected = forward(adapted, prompt)
        torch.testing.assert_close((stream[number], logits[number]), expected, **CLOSE)
    with adapted.disable_adapter():
        assert not torch.allclose(forward(adapted, PROMPT)[1], logits[0], atol=1e-2)


def test_without_what_the_adapter_adds_it_is_the_base_model(model: Any, adapted: Any) -> None:
    layers = model.base_model.model.model.layers
    with model.trace(PROMPT):
        for layer in layers:
            layer.self_attn.q_proj.lora_B["default"].output[:] = 0
            layer.mlp.down_proj.lora_B["default"].output[:] = 0
        logits = model.logits.save()
    with adapted.disable_adapter():
        torch.testing.assert_close(logits, forward(adapted, PROMPT)[1], **CLOSE)


def test_it_generates_what_it_generates(model: Any, adapted: Any) -> None:
    (output,) = model.generate(PROMPT, max_tokens=4, ignore_eos=True)
    expected = adapted.generate(input_ids=torch.tensor([PROMPT]), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert output.outputs[0].token_ids == expected[0, -4:].tolist()


def test_gradients_go_through_adapters(model: Any, adapted: Any) -> None:
    with model.trace(PROMPT):
        down = model.base_model.model.model.layers[1].mlp.down_proj.lora_A["default"].output
        model.logits.logsumexp(-1).sum().backward()
        gradient = down.grad.save()
    found: list[torch.Tensor] = []
    module = adapted.base_model.model.model.layers[1].mlp.down_proj.lora_A["default"]
    hook = module.register_forward_hook(lambda module, args, output: found.append(output.requires_grad_()) or output)
    (expected,) = torch.autograd.grad(adapted(torch.tensor([PROMPT])).logits[:, -1].logsumexp(-1).sum(), found[0])
    hook.remove()
    torch.testing.assert_close(gradient, expected[0], **CLOSE)
