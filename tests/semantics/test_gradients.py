# ruff: noqa: PT012, SIM117 -- a block is what is assigned in it, and may well be several statements
"""What vLLM cannot do is refused at its line, with the name of what can; a block's own gradients are its own matter."""

from __future__ import annotations

import traceback

import pytest
import torch

from nnsight_async import NNsightError, save
from nnsight_async.testing.oracle import generation

pytestmark = pytest.mark.backends("vllm")

PROMPT = [5, 17, 101, 9, 33, 250, 77]
GREEDY = {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True}


def takes_backward(model, tracer):
    hidden = model.model.layers[1].output[0]
    model.logits.sum().backward()


def enters_backward(model, tracer):
    hidden = model.model.layers[1].output[0]
    with model.logits.sum().backward():
        gradient = hidden.grad.save()


def reads_a_gradient(model, tracer):
    gradient = model.model.layers[1].output[0].grad.save()


def takes_backward_of_what_it_asked_for(model, tracer):
    hidden = model.model.layers[1].output[0].requires_grad_()
    (hidden * model.logits.sum()).sum().backward()


def reads_the_gradient_of_a_weight(model, tracer):
    gradient = model.model.norm.weight.grad.save()


def takes_backward_in_a_helper(model, tracer):
    minimised(model.logits)


def minimised(logits):
    logits.sum().backward()


def waits_for_others(model, tracer):
    tracer.barrier(2)()


def scans(model, tracer):
    tracer.scan()


def scans_the_model(model, tracer):
    model.scan(PROMPT)


def in_session(model, tracer):
    model.session()


@pytest.mark.parametrize(
    ("probe", "what"),
    [
        (takes_backward, ".backward"),
        (enters_backward, ".backward"),
        (takes_backward_in_a_helper, ".backward"),
        (reads_a_gradient, ".grad"),
        (takes_backward_of_what_it_asked_for, ".backward"),
        (reads_the_gradient_of_a_weight, ".grad"),
        (waits_for_others, "tracer.barrier"),
        (scans, "tracer.scan"),
        (scans_the_model, "model.scan"),
        (in_session, "model.session"),
    ],
)
def test_is_refused_in_a_block(model, probe, what):
    with pytest.raises(NotImplementedError, match=rf"{what}.*vLLM.*TransformersModel") as caught:
        model.run(PROMPT, probe, **GREEDY).result()
    assert isinstance(caught.value, NNsightError)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert what.removeprefix("tracer") in (last.line or "")


def test_is_refused_in_a_with(model):
    with pytest.raises(NotImplementedError, match=r"\.backward needs gradients.*TransformersModel"):
        with model.trace(PROMPT, **GREEDY):
            loss = model.logits.logsumexp(-1).sum()
            loss.backward()
    with pytest.raises(NotImplementedError, match=r"\.grad needs gradients.*TransformersModel"):
        with model.trace(PROMPT, **GREEDY):
            gradient = model.model.layers[1].output[0].grad.save()
    with pytest.raises(NotImplementedError, match=r"tracer\.barrier.*TransformersModel"):
        with model.trace(PROMPT, **GREEDY) as tracer:
            tracer.barrier(2)


def test_is_refused_outside_of_blocks(model):
    with pytest.raises(NotImplementedError, match=r"model\.scan.*TransformersModel"):
        with model.scan(PROMPT):
            pass
    with pytest.raises(NotImplementedError, match=r"model\.session.*TransformersModel"):
        with model.session():
            pass
    with pytest.raises(NotImplementedError, match=r"tracer\.barrier.*TransformersModel"):
        with model.trace(**GREEDY) as tracer:
            barrier = tracer.barrier(2)
    with model.trace(PROMPT, **GREEDY) as tracer:
        logits = model.logits.save()
    with pytest.raises(NotImplementedError, match=r"tracer\.scan.*TransformersModel"):
        tracer.scan


def test_a_refusal_can_be_handled_in_the_block(model, hf):
    with model.trace(PROMPT, **GREEDY):
        logits = model.logits.save()
        try:
            logits.sum().backward()
        except NotImplementedError:
            handled = save(True)
    assert handled
    torch.testing.assert_close(logits, generation(hf, PROMPT, 1).logits, rtol=1e-4, atol=1e-4)


def test_what_torch_itself_refuses_has_a_note(model):
    with pytest.raises(RuntimeError, match="does not require grad") as caught:
        with model.trace(PROMPT, **GREEDY):
            hidden = model.model.layers[1].output[0]
            torch.autograd.grad(model.logits.sum(), hidden)
    assert any("TransformersModel" in note for note in caught.value.__notes__)


def test_gradients_of_what_the_block_computes_by_itself(model):
    with model.trace(PROMPT, **GREEDY):
        hidden = model.model.layers[1].resid_post.save()
        with torch.inference_mode(False), torch.enable_grad():
            weights = hidden.clone().requires_grad_()
            (weights**2).sum().backward()
            gradient = weights.grad.save()
    torch.testing.assert_close(gradient, 2 * hidden)


def test_attributes_of_these_names_of_other_things(model):
    class Slope:
        grad = 3

        def backward(self, steps):
            return self.grad - steps

    with model.trace(PROMPT, **GREEDY):
        slope = Slope()
        found = save((slope.grad, slope.backward(1), slope.backward(steps=2)))
    assert found == (3, 2, 1)
