"""Shapes of everything, from a config alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight_async import TransformersModel, save
from nnsight_async.testing import hf_model, tiny_checkpoint

PROMPT = list(range(10, 17))

LARGE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("large")
    (folder / "config.json").write_text(json.dumps(LARGE))
    model = TransformersModel(str(folder))
    yield model
    model.close()


def test_shapes_of_seventy_billion_weights_without_any(large):
    with large.scan(PROMPT):
        inner = large.model.layers[0].mlp.gate_proj.output.save()
        streams = save([layer.resid_post for layer in large.model.layers])
        logits = large.logits.save()
    assert [tuple(stream.shape) for stream in streams] == [(7, 8192)] * 80
    assert (tuple(inner.shape), inner.dtype, inner.device.type) == ((7, 28672), torch.bfloat16, "meta")
    assert tuple(logits.shape) == (1, 128256)
    assert not large.dispatched


def test_the_shape_of_a_replacement_is_checked(large):
    with pytest.raises(ValueError, match=r"shape \(7, 8192\); the one given has \(7, 8191\)"), large.scan(PROMPT):
        large.model.layers[3].output = large.model.layers[3].output[:, 1:]


def test_what_the_block_takes_along_is_without_values_too(large):
    vector = torch.ones(8192, dtype=torch.bfloat16)
    with large.scan(PROMPT):
        large.model.layers[3].output = large.model.layers[3].output + vector
        after = large.model.layers[4].resid_pre.save()
    assert tuple(after.shape) == (7, 8192)


def test_a_value_that_is_not_there_is_an_error_of_the_block(large):
    with pytest.raises(RuntimeError, match="meta"), large.scan(PROMPT):
        float(large.logits.max())


async def test_async(llama):
    model = TransformersModel(llama, mode="async")
    async with model.scan("a prompt of text"):
        logits = model.logits.save()
    assert tuple((await logits).shape) == (1, 512)
    assert not model.dispatched
    model.close()


def test_experts_in_float32():
    """Their product of matrices has no shapes to tell in any type but bfloat16."""
    model = TransformersModel(tiny_checkpoint("qwen3_moe"))
    with model.scan(PROMPT):
        inner = model.model.layers[0].mlp.experts.act_fn.output.save()
        out = model.model.layers[0].mlp.output.save()
    assert (tuple(inner.shape), tuple(out.shape), out.dtype) == ((14, 64), (7, 64), torch.float32)
    with model.trace(PROMPT):
        computed = model.model.layers[0].mlp.experts.act_fn.output.save()
    assert computed.shape == inner.shape
    model.close()


def test_the_type_that_was_asked_for_and_a_config_that_is_left_alone(llama):
    model = TransformersModel(llama, dtype=torch.bfloat16, attn_implementation="eager")
    with model.scan(PROMPT):
        weights = model.model.layers[0].self_attn.output[1].save()
        logits = model.logits.save()
    assert (logits.dtype, tuple(weights.shape)) == (torch.bfloat16, (1, 4, 7, 7))
    model.close()
    given = hf_model("qwen3_moe")
    before = given.config.to_dict(), given.config._experts_implementation
    with TransformersModel(given) as model, model.scan(PROMPT):
        logits = model.logits.save()
    assert (given.config.to_dict(), given.config._experts_implementation) == before
