"""Gradients of what a block reads are those that PyTorch gives for the same graph."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch

from nnsight_async import UnsupportedError, save

PROMPT = [5, 17, 101, 9, 33, 250, 77]
SHORT = [300, 41, 8]
CLOSE = {"rtol": 1e-4, "atol": 1e-6}
RIGHT, WRONG = 7, 11


class Watched:
    """What passed in a forward pass of transformers, by name, each part of the graph; edited on its way."""

    def __init__(self, hf: Any, prompt: list[int], places: dict[str, Any], edits: dict[str, Any] | None = None) -> None:
        self.values: dict[str, torch.Tensor] = {}
        with ExitStack() as hooks:
            for name, module in places.items():
                hooks.callback(module.register_forward_hook(self._hook(name, (edits or {}).get(name))).remove)
            self.logits = hf(torch.tensor([prompt])).logits[0, -1]

    def _hook(self, name: str, edit: Any) -> Any:
        def hook(module: Any, args: Any, output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            hidden = hidden if edit is None else edit(hidden)
            self.values[name] = hidden
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        return hook

    def gradients(self) -> dict[str, torch.Tensor]:
        loss = self.logits[RIGHT] - self.logits[WRONG]
        found = torch.autograd.grad(loss, list(self.values.values()))
        return {name: gradient[0] for name, gradient in zip(self.values, found, strict=True)}


def test_of_values_at_several_places(pair):
    with pair.model.trace(PROMPT):
        first = pair.layers[0].resid_post
        inner = pair.layers[1].mlp.output
        last = pair.layers[3].resid_post
        (model_logits := pair.model.logits)[0, RIGHT].sub(model_logits[0, WRONG]).backward()
        found = save({"first": first.grad, "inner": inner.grad, "last": last.grad})
    layers = pair.hf_layers
    expected = Watched(pair.hf, PROMPT, {"first": layers[0], "inner": layers[1].mlp, "last": layers[3]}).gradients()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, **CLOSE)


def test_with_edits_on_the_way(pair):
    """In place, and a replacement that is computed from what was read."""
    with pair.model.trace(PROMPT):
        first = pair.layers[0].resid_post
        first[2:] *= 1.5
        inner = pair.layers[1].mlp.output
        pair.layers[1].mlp.output = inner * 0.5 + first.mean()
        last = pair.layers[2].resid_post
        loss = pair.model.logits[0, RIGHT] - pair.model.logits[0, WRONG]
        loss.backward()
        gradients = save([first.grad, last.grad])
    held: dict[str, torch.Tensor] = {}

    def scaled(hidden: torch.Tensor) -> torch.Tensor:
        held["first"] = torch.cat([hidden[:, :2], hidden[:, 2:] * 1.5], 1)
        return held["first"]

    layers = pair.hf_layers
    expected = Watched(
        pair.hf,
        PROMPT,
        {"first": layers[0], "inner": layers[1].mlp, "last": layers[2]},
        {"first": scaled, "inner": lambda hidden: hidden * 0.5 + held["first"].mean()},
    ).gradients()
    torch.testing.assert_close(gradients[0], expected["first"], **CLOSE)
    torch.testing.assert_close(gradients[1], expected["last"], **CLOSE)


def test_of_the_input_of_a_module_and_of_the_stream_inside_a_layer(pair):
    """The stream between attention and MLP goes two ways, and gradients come back on both."""
    with pair.model.trace(PROMPT):
        middle = pair.layers[1].resid_mid
        before = pair.layers[2].input
        loss = pair.model.logits[0, RIGHT] - pair.model.logits[0, WRONG]
        loss.backward()
        found = save([middle.grad, before.grad])
    taken: dict[str, torch.Tensor] = {}
    norm = pair.hf_layers[1].ln_2 if hasattr(pair.hf, "transformer") else pair.hf_layers[1].post_attention_layernorm
    hook = norm.register_forward_pre_hook(lambda module, args: taken.update(middle=args[0]))
    other = pair.hf_layers[2].register_forward_pre_hook(lambda module, args: taken.update(before=args[0]))
    logits = pair.hf(torch.tensor([PROMPT])).logits[0, -1]
    hook.remove()
    other.remove()
    expected = torch.autograd.grad(logits[RIGHT] - logits[WRONG], [taken["middle"], taken["before"]])
    for gradient, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, wanted[0], **CLOSE)


def test_of_prompts_that_share_a_batch_each_its_own(pair):
    prompts = [PROMPT, SHORT, PROMPT[:5]]
    with pair.model.trace() as tracer:
        for number, prompt in enumerate(prompts):
            with tracer.invoke(prompt):
                hidden = pair.layers[1].resid_post
                hidden[:] *= number + 1
                loss = pair.model.logits[0, RIGHT] - pair.model.logits[0, WRONG]
                loss.backward(retain_graph=True)
                gradients = hidden.grad.save()
    for number, prompt in enumerate(prompts):
        edit = {"it": lambda hidden, number=number: hidden * (number + 1)}
        expected = Watched(pair.hf, prompt, {"it": pair.hf_layers[1]}, edit).gradients()["it"]
        torch.testing.assert_close(gradients[number], expected, **CLOSE)


def test_of_prompts_that_share_a_batch_in_their_order_whatever_each_has_read_before(pair):
    """The last one may do without `retain_graph`, and is the last to call `backward`."""
    with pair.model.trace() as tracer:
        with tracer.invoke(PROMPT):
            pair.layers[0].mlp.output[:] *= 0.5
            hidden = pair.layers[1].resid_post
            loss = pair.model.logits[0, RIGHT] - pair.model.logits[0, WRONG]
            loss.backward(retain_graph=True)
            gradients = hidden.grad.save()
        with tracer.invoke(SHORT):
            hidden = pair.layers[1].resid_post
            loss = pair.model.logits[0, RIGHT] - pair.model.logits[0, WRONG]
            loss.backward()
            gradients = hidden.grad.save()
    edits = {"half": lambda output: output * 0.5}
    modules = {"half": pair.hf_layers[0].mlp, "it": pair.hf_layers[1]}
    for gradient, watched in zip(
        gradients, [Watched(pair.hf, PROMPT, modules, edits), Watched(pair.hf, SHORT, modules)], strict=True
    ):
        torch.testing.assert_close(gradient, watched.gradients()["it"], **CLOSE)


def test_in_a_with(model, hf):
    with model.trace(PROMPT):
        hidden = model.model.layers[1].resid_post
        loss = model.logits[0, RIGHT] - model.logits[0, WRONG]
        with loss.backward():
            gradient = hidden.grad.save()
    expected = Watched(hf, PROMPT, {"it": hf.model.layers[1]}).gradients()["it"]
    torch.testing.assert_close(gradient, expected, **CLOSE)


def test_of_two_readings_of_one_place(model, hf):
    """The second is computed from the first, and so is the rest of the pass."""
    with model.trace(PROMPT):
        first = model.model.layers[1].resid_post
        second = model.model.layers[1].resid_post
        loss = model.logits[0, RIGHT] - model.logits[0, WRONG]
        loss.backward()
        found = save([first.grad, second.grad])
    expected = Watched(hf, PROMPT, {"it": hf.model.layers[1]}).gradients()["it"]
    torch.testing.assert_close(found[0], expected, **CLOSE)
    torch.testing.assert_close(found[1], expected, **CLOSE)


def test_of_an_operation_inside_a_forward(model, hf):
    with model.trace(PROMPT):
        gated = model.model.layers[1].mlp.source.act_fn_0.output
        loss = model.logits[0, RIGHT] - model.logits[0, WRONG]
        loss.backward()
        gradient = gated.grad.save()
    expected = Watched(hf, PROMPT, {"it": hf.model.layers[1].mlp.act_fn}).gradients()["it"]
    torch.testing.assert_close(gradient, expected, **CLOSE)


def test_of_something_that_is_put_in_the_place_of_a_value(model, hf):
    """A leaf of the block's own: how much the loss depends on it."""
    vector = torch.linspace(-1, 1, hf.config.hidden_size)
    with model.trace(PROMPT):
        steering = vector.clone().requires_grad_()
        model.model.layers[1].output = model.model.layers[1].output + steering
        loss = model.logits[0, RIGHT] - model.logits[0, WRONG]
        loss.backward()
        gradient = steering.grad.save()
    expected = Watched(hf, PROMPT, {"it": hf.model.layers[1]}, {"it": lambda hidden: hidden + vector}).gradients()["it"]
    torch.testing.assert_close(gradient, expected.sum(0), **CLOSE)


def test_of_each_step_of_a_generation(model, hf):
    with model.generate(PROMPT, max_tokens=3, ignore_eos=True) as tracer:
        gradients = save([])
        for _ in tracer.iter[:]:
            hidden = model.model.layers[2].resid_post
            (model.logits[0, RIGHT] - model.logits[0, WRONG]).backward()
            gradients.append(hidden.grad)
    ids = tracer.result.outputs[0].token_ids
    for step, gradient in enumerate(gradients):
        whole = Watched(hf, PROMPT + ids[:step], {"it": hf.model.layers[2]}).gradients()["it"]
        torch.testing.assert_close(gradient, whole[-len(gradient) :], **CLOSE)


def test_what_torch_itself_takes(model, hf):
    with model.trace(PROMPT):
        hidden = model.model.layers[1].resid_post
        loss = model.logits[0, RIGHT] - model.logits[0, WRONG]
        gradient = torch.autograd.grad(loss, hidden)[0].save()
    expected = Watched(hf, PROMPT, {"it": hf.model.layers[1]}).gradients()["it"]
    torch.testing.assert_close(gradient, expected, **CLOSE)


def test_no_graph_is_recorded_where_nothing_takes_gradients(model):
    with model.trace(PROMPT):
        silent = (model.logits.grad_fn is None).save()
    with model.trace(PROMPT, gradients=True):
        told = (model.logits.grad_fn is None).save()
    with model.trace(PROMPT):
        foreseen = (model.logits.grad_fn is None).save()
        if model.logits.shape[0] > 1:
            model.logits.sum().backward()
    assert (silent, told, foreseen) == (True, False, False)


def test_switched_off_it_says_so(model):
    with pytest.raises(UnsupportedError, match="gradients=True"), model.trace(PROMPT, gradients=False):
        model.logits.sum().backward()


def test_a_value_of_the_blocks_own_keeps_no_gradient_unless_told(model):
    with pytest.raises(UnsupportedError, match="retain_grad"), model.trace(PROMPT):  # noqa: PT012
        last = model.model.layers[1].resid_post[-1]
        model.logits.sum().backward()
        last.grad
    with model.trace(PROMPT):
        hidden = model.model.layers[1].resid_post
        doubled = hidden * 2
        doubled.retain_grad()
        model.model.layers[1].output = doubled
        model.logits.sum().backward()
        found = save([hidden.grad, doubled.grad])
    torch.testing.assert_close(found[0], found[1] * 2)


def test_weights_are_frozen_and_what_comes_home_is_of_no_graph(model):
    with model.trace(PROMPT):
        logits = model.logits.save()
        logits.sum().backward()
    assert not logits.requires_grad
    assert not any(weight.requires_grad or weight.grad is not None for weight in model.module.parameters())


def test_reading_where_gradients_are_switched_off_cuts_no_graph(model, hf):
    with model.trace(PROMPT):
        early = model.model.layers[0].resid_post
        with torch.no_grad():
            size = model.model.layers[1].resid_post.norm().save()
        loss = model.logits[0, RIGHT] - model.logits[0, WRONG]
        loss.backward()
        gradient = early.grad.save()
    expected = Watched(hf, PROMPT, {"it": hf.model.layers[0]}).gradients()["it"]
    torch.testing.assert_close(gradient, expected, **CLOSE)
