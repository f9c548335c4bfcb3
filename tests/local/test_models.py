"""Models that come in other ways than from a repository of text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight_async import EngineClosedError, LocationError, TransformersModel, UnsupportedError
from nnsight_async.testing import hf_model

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
PROMPT = [5, 17, 101, 9, 33]


def test_one_that_has_been_loaded(hf):
    given = hf_model("llama")
    with TransformersModel(given) as model:
        assert model.module is given
        with model.trace(PROMPT):
            logits = model.logits.save()
    with torch.no_grad():
        torch.testing.assert_close(logits, hf(torch.tensor([PROMPT])).logits[:, -1], **CLOSE)


def test_arguments_of_from_pretrained_and_a_dtype(llama):
    with (
        TransformersModel(llama, dtype=torch.bfloat16, attn_implementation="eager") as model,
        model.trace(PROMPT),
    ):
        hidden = model.model.layers[0].output.save()
    assert hidden.dtype == torch.bfloat16
    assert model.module.config._attn_implementation == "eager"


def test_weights_are_loaded_by_the_first_trace_and_not_by_the_tree(llama):
    model = TransformersModel(llama)
    assert "LlamaDecoderLayer" in repr(model)
    assert (model.dispatched, model.module) == (False, None)
    layer = model.model.layers[1]
    with model.trace(PROMPT):
        hidden = layer.output.save()
    assert model.dispatched
    assert hidden.shape == (5, 128)
    model.close()
    with pytest.raises(EngineClosedError), model.trace(PROMPT):
        logits = model.logits.save()


@pytest.fixture(scope="module")
def seeing() -> Any:
    """A LLaVA of random weights: a vision tower, a projector, a language model."""
    from transformers import AutoModelForImageTextToText, LlavaConfig

    torch.manual_seed(0)
    config = LlavaConfig(
        text_config={
            "model_type": "llama",
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        image_token_index=500,
    )
    return AutoModelForImageTextToText.from_config(config).eval()


def inputs(shade: float) -> dict[str, torch.Tensor]:
    """What a processor makes of an image and a text: an id for each patch, and the pixels."""
    pixels = torch.linspace(-1, shade, 3 * 28 * 28).reshape(1, 3, 28, 28)
    return {"input_ids": torch.tensor([[1, 500, 500, 500, 500, 17, 42]]), "pixel_values": pixels}


def test_an_image_and_what_is_read_and_edited_of_it(seeing):
    with torch.no_grad():
        expected = seeing(**inputs(1.0)).logits[:, -1]
        features = seeing.get_image_features(inputs(1.0)["pixel_values"])
    with TransformersModel(seeing) as model:
        with model.trace(inputs(1.0)):
            patches = model.model.multi_modal_projector.output.save()
            stream = model.model.language_model.layers[0].resid_post.save()
            logits = model.logits.save()
        with model.trace(inputs(1.0)):
            model.model.multi_modal_projector.output = torch.zeros(patches.shape)
            blind = model.logits.save()
        with model.trace(inputs(0.5)):
            other = model.logits.save()
        generated = model.generate(inputs(1.0), max_tokens=3, ignore_eos=True)[0].outputs[0].token_ids
    torch.testing.assert_close(logits, expected, **CLOSE)
    assert stream.shape == (7, 64)
    assert not torch.allclose(blind, logits)
    assert not torch.allclose(other, logits)
    features = getattr(features, "pooler_output", features)
    found = torch.cat(list(features)) if isinstance(features, (list, tuple)) else features
    torch.testing.assert_close(patches.reshape(-1, 64), found.reshape(-1, 64), **CLOSE)
    assert generated == seeing.generate(**inputs(1.0), max_new_tokens=3, do_sample=False)[0, -3:].tolist()


def test_gradients_reach_the_image(seeing):
    with TransformersModel(seeing) as model, model.trace(inputs(1.0)):
        patches = model.model.vision_tower.encoder.layers[1].output
        loss = model.logits[0, 7]
        loss.backward()
        gradient = patches.grad.save()
    assert gradient.abs().sum() > 0


def test_an_error_in_the_middle_of_a_pass_leaves_the_next_one_alone(model):
    activation = vars(model.module.model.layers[2].mlp.act_fn)
    activation["forward"] = lambda hidden: hidden.reshape(3, 3)
    with pytest.raises(RuntimeError, match="shape"), model.trace(PROMPT):
        hidden = model.model.layers[3].output.save()
    del activation["forward"]
    with model.trace(PROMPT):
        hidden = model.model.layers[3].output.save()
    assert hidden.shape == (5, 128)


def test_what_is_not_there_yet_and_what_is_of_the_caller(model):
    with pytest.raises(UnsupportedError, match=r"model\.barrier is not of a model: a tracer makes"):
        model.barrier(2)
    with pytest.raises(UnsupportedError, match=r"model\.session cannot be used in a block"), model.trace(PROMPT):
        model.session()
    with pytest.raises(UnsupportedError, match=r"model\.scan cannot be used in a block"), model.trace(PROMPT):
        model.scan(PROMPT)
    with pytest.raises(LocationError, match=r"self_attn holds no attention layer of vLLM"), model.trace(PROMPT):
        model.model.layers[1].self_attn.heads.output.save()
    with pytest.raises(UnsupportedError, match="lora_request"):
        model.trace(PROMPT, lora_request=object())
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        model.trace(PROMPT, temprature=1.0)
    with pytest.raises(UnsupportedError, match=r"presence_penalty=.*takes max_tokens.*model\.logits"):
        model.trace(PROMPT, presence_penalty=1.0)


@pytest.mark.parametrize(("slip", "near"), [("dtyp", "dtype"), ("tokeniser", "tokenizer"), ("devise", "device")])
def test_a_keyword_that_is_a_slip_for_another(llama, slip, near):
    with pytest.raises(TypeError, match=f"'{slip}'; did you mean '{near}'"):
        TransformersModel(llama, **{slip: "cpu"})


def test_an_attribute_of_the_config_is_no_slip(llama):
    with TransformersModel(llama, use_cache=False) as model:
        assert model.module.config.use_cache is False


def test_a_model_that_has_been_loaded_takes_no_arguments_of_from_pretrained():
    with pytest.raises(TypeError, match="dtype= is for from_pretrained"):
        TransformersModel(hf_model("llama"), dtype="bfloat16")
