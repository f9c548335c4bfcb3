"""The residual stream of a layer, on architectures that keep it in one tensor and in two."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight_async import GenerationEndedError, OutOfOrderError, ShapeError

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
PROMPT = [5, 17, 101, 9, 33, 250, 77]


def forward(pair: Any, *hooks: tuple[torch.nn.Module, str, Any]) -> torch.Tensor:
    """Logits of the last token in transformers, with hooks on inputs ("pre") or outputs ("post") of modules."""
    handles = []
    for module, when, edit in hooks:
        if when == "pre":
            handles.append(module.register_forward_pre_hook(lambda _, args, edit=edit: edit(args[0])))
        else:
            handles.append(module.register_forward_hook(lambda _, args, output, edit=edit: edit(output)))
    with torch.no_grad():
        logits = pair.hf(torch.tensor([PROMPT])).logits[0, -1]
    for handle in handles:
        handle.remove()
    return logits


def norm_of_middle(layer: torch.nn.Module) -> torch.nn.Module:
    return layer.ln_2 if hasattr(layer, "ln_2") else layer.post_attention_layernorm


def test_read_before_between_and_after(pair):
    layers, hf_layers = pair.layers, pair.hf_layers
    with pair.model.trace(PROMPT, max_tokens=1):
        before = layers[1].resid_pre.save()
        middle = layers[1].resid_mid.save()
        after = layers[1].resid_post.save()
    seen: dict[str, torch.Tensor] = {}
    forward(
        pair,
        (hf_layers[1], "pre", lambda hidden: seen.update(before=hidden[0])),
        (norm_of_middle(hf_layers[1]), "pre", lambda hidden: seen.update(middle=hidden[0])),
        (hf_layers[2], "pre", lambda hidden: seen.update(after=hidden[0])),
    )
    torch.testing.assert_close(before, seen["before"], **CLOSE)
    torch.testing.assert_close(middle, seen["middle"], **CLOSE)
    torch.testing.assert_close(after, seen["after"], **CLOSE)


def test_write_before_a_layer_in_place(pair):
    layers = pair.layers
    for number in (0, 2):
        with pair.model.trace(PROMPT, max_tokens=1):
            layers[number].resid_pre[3] *= 2
            logits = pair.model.logits.save()

        def double(hidden: torch.Tensor) -> torch.Tensor:
            hidden = hidden.clone()
            hidden[0, 3] *= 2
            return hidden

        expected = forward(pair, (pair.hf_layers[number], "pre", double))
        torch.testing.assert_close(logits[0], expected, **CLOSE)


def test_write_after_a_layer_by_replacement(pair):
    layers = pair.layers
    with pair.model.trace(PROMPT, max_tokens=1):
        layers[1].resid_post = layers[1].resid_post * 0.5
        again = layers[2].resid_pre.save()
        logits = pair.model.logits.save()
    seen: dict[str, torch.Tensor] = {}

    def halve(hidden: torch.Tensor) -> torch.Tensor:
        seen["again"] = hidden[0] * 0.5
        return hidden * 0.5

    expected = forward(pair, (pair.hf_layers[2], "pre", halve))
    torch.testing.assert_close(again, seen["again"], **CLOSE)
    torch.testing.assert_close(logits[0], expected, **CLOSE)


def test_write_between_attention_and_mlp(pair):
    layers = pair.layers
    vector = torch.randn(pair.hf.config.hidden_size, generator=torch.Generator().manual_seed(3))
    with pair.model.trace(PROMPT, max_tokens=1):
        layers[1].resid_mid[:] += vector
        logits = pair.model.logits.save()

    # Adding to the stream in the middle is adding to what attention contributes to it.
    attention = pair.hf_layers[1].attn if pair.name == "gpt2" else pair.hf_layers[1].self_attn
    expected = forward(pair, (attention, "post", lambda output: (output[0] + vector, *output[1:])))
    torch.testing.assert_close(logits[0], expected, **CLOSE)


def test_skip_gives_a_layer_another_output(pair):
    """Skipping a layer by its own input leaves the stream as it was."""
    layers, sums = pair.layers, pair.sums
    with pair.model.trace(PROMPT, max_tokens=1):
        stream = layers[2].resid_pre
        layers[2].skip((torch.zeros_like(stream), stream) if sums else stream)
        logits = pair.model.logits.save()
    seen: dict[str, Any] = {}

    def same(output: Any) -> Any:
        return (seen["in"], *output[1:]) if isinstance(output, tuple) else seen["in"]

    expected = forward(
        pair,
        (pair.hf_layers[2], "pre", lambda hidden: seen.update({"in": hidden})),
        (pair.hf_layers[2], "post", same),
    )
    torch.testing.assert_close(logits[0], expected, **CLOSE)


@pytest.mark.backends("vllm")
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.ones(1, 4, 32), r"of shape \(7, 4, 32\), not one of \(1, 4, 32\)"),
        (3.0, "not 3.0"),
        (torch.ones(7, 4, 32, dtype=torch.complex64), "complex64 does not convert"),
    ],
)
def test_what_heads_do_not_take(model, value, said):
    attention = model.model.layers[1].self_attn
    with pytest.raises(ShapeError, match=said), model.trace(PROMPT, max_tokens=1):
        attention.heads.output = value


@pytest.mark.backends("vllm")
def test_heads_are_not_iterated_over(model):
    attention = model.model.layers[1].self_attn
    with pytest.raises(TypeError, match="not iterated over"):
        list(attention.heads)
    with pytest.raises(TypeError, match="not iterated over"), model.trace(PROMPT, max_tokens=1):
        list(attention.heads)


@pytest.mark.backends("vllm")
def test_heads(pair):
    """What the heads put out, side by side, is what the output projection takes in."""
    layer = pair.layers[1]
    attention = layer.attn if pair.name == "gpt2" else layer.self_attn
    with pair.model.trace(PROMPT, max_tokens=1):
        outputs = attention.heads.output.save()
        one = attention.heads[2].output.save()
        attention.heads[2].output = torch.zeros_like(one)
        logits = pair.model.logits.save()
    hf_attention = pair.hf_layers[1].attn if pair.name == "gpt2" else pair.hf_layers[1].self_attn
    projection = hf_attention.c_proj if pair.name == "gpt2" else hf_attention.o_proj
    seen: dict[str, torch.Tensor] = {}
    size = outputs.shape[-1]

    def ablate(inputs: torch.Tensor) -> torch.Tensor:
        seen["inputs"] = inputs[0]
        inputs = inputs.clone()
        inputs[..., 2 * size : 3 * size] = 0
        return inputs

    expected = forward(pair, (projection, "pre", ablate))
    torch.testing.assert_close(outputs.flatten(1), seen["inputs"], **CLOSE)
    torch.testing.assert_close(one, outputs[:, 2])
    torch.testing.assert_close(logits[0], expected, **CLOSE)


@pytest.mark.backends("vllm")
def test_attention_pattern_from_queries_and_keys(pair):
    """Softmax of q k^T / sqrt(d), causally masked, mixes the values into the heads' outputs."""
    layer = pair.layers[1]
    attention = layer.attn if pair.name == "gpt2" else layer.self_attn
    with pair.model.trace(PROMPT, max_tokens=1):
        q = attention.heads[1].q.save()
        k = attention.heads[1].k.save()
        v = attention.heads[1].v.save()
        mixed = attention.heads[1].output.save()
    scores = q @ k.T / q.shape[-1] ** 0.5
    causal = torch.ones_like(scores).tril().bool()
    pattern = scores.masked_fill(~causal, float("-inf")).softmax(-1)
    torch.testing.assert_close(pattern @ v, mixed, **CLOSE)


@pytest.mark.backends("vllm")
def test_declared_steering_equals_the_block_bit_by_bit(pair):
    model, layer, width = pair.model, pair.layers[1], pair.hf.config.hidden_size
    vector = torch.randn(width, generator=torch.Generator().manual_seed(1))
    declared = [model.steer(layer, vector, scale=1.5), model.replace(pair.layers[2], vector, positions=[2, -1])]
    scaled = 1.5 * vector

    def block(view, tracer):
        for step in tracer.iter[:]:
            layer.resid_post += scaled
            if step == 0:
                pair.layers[2].resid_post[[2, -1]] = vector
            tracer.save(view.logits, "logits")

    def nothing(view, tracer):
        for _ in tracer.iter[:]:
            tracer.save(view.logits, "logits")

    sampling = {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True}
    by_block = model.run(PROMPT, block, **sampling).result()
    by_ops = model.run(PROMPT, nothing, ops=declared, **sampling).result()

    assert by_ops.outputs[0].token_ids == by_block.outputs[0].token_ids
    assert torch.equal(by_ops.saves["logits"], by_block.saves["logits"])
    plain = model.run(PROMPT, nothing, **sampling).result()
    assert not torch.equal(by_ops.saves["logits"], plain.saves["logits"])


@pytest.mark.parametrize("name", ["resid_pre", "resid_mid", "resid_post"])
def test_one_that_was_passed_is_named_as_it_is_written(model, name):
    words = rf"model\.model\.layers\[1\]\.{name} has already been passed"
    with pytest.raises(OutOfOrderError, match=words), model.trace(PROMPT, max_tokens=1):  # noqa: PT012
        model.model.layers[2].output
        getattr(model.model.layers[1], name).save()


def test_one_that_is_asked_for_too_late_is_named_as_it_is_written(model):
    words = r"model\.model\.layers\[1\]\.resid_post was asked for after"
    with pytest.raises(GenerationEndedError, match=words), model.trace(PROMPT, max_tokens=1) as tracer:  # noqa: PT012
        for _ in tracer.iter[:]:
            pass
        model.model.layers[1].resid_post.save()


@pytest.mark.parametrize("place", ["resid_pre", "resid_mid", "resid_post", "input"])
def test_what_does_not_fit_is_named_as_it_was_written(model, place):
    layer = model.model.layers[1]

    def replaced(view, tracer):
        setattr(layer, place, torch.zeros(3, 3))

    def resized(view, tracer):
        getattr(layer, place).resize_(3)

    for probe in (replaced, resized):
        with pytest.raises(ShapeError, match=rf"layers\[1\]\.{place}\b"):
            model.run(PROMPT, probe, max_tokens=1).result()
