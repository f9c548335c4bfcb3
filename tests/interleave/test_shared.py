"""What belongs to all requests is read and not changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnsight_async.errors import IsolationError
from nnsight_async.interleave.shared import CHANGING, guarded

Change = Callable[[torch.Tensor], Any]


def layer() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3)


CHANGES: dict[str, Change] = {
    "item": lambda weight: weight.__setitem__(slice(None), 0),
    "method": lambda weight: weight.zero_(),
    "operator": lambda weight: weight.__iadd__(1),
    "function": lambda weight: torch.nn.init.zeros_(weight),
    "random": lambda weight: weight.uniform_(),
    "out": lambda weight: torch.add(weight, 1, out=weight),
    "inplace": lambda weight: torch.nn.functional.relu(weight, inplace=True),
    "list": lambda weight: torch._foreach_zero_([weight]),
    "data": lambda weight: weight.data.zero_(),
    "detached": lambda weight: weight.detach().fill_(1),
    "row": lambda weight: weight[0].mul_(0),
    "iterated": lambda weight: [row.zero_() for row in weight],
    "chunk": lambda weight: torch.chunk(weight, 3)[1].zero_(),
    "transposed": lambda weight: weight.T.__setitem__(0, 1),
    "reshaped": lambda weight: weight.view(-1).__setitem__(3, 1),
    "same dtype": lambda weight: weight.to(torch.float32).zero_(),
    "same device": lambda weight: weight.cpu().zero_(),
    "same layout": lambda weight: weight.contiguous().zero_(),
    "gradient": lambda weight: setattr(weight, "requires_grad", True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_weights_are_not_changed(change: Change):
    module = layer()
    before = module.weight.detach().clone()
    with pytest.raises(IsolationError, match="which all requests share; change a copy"):
        change(guarded(module.weight, "weight", "model.layer"))
    assert torch.equal(module.weight, before)
    assert module.weight.requires_grad


def test_arrays_of_weights_are_not_changed():
    array = guarded(layer().weight, "weight", "model.layer").numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 0


def test_what_is_computed_from_weights_is_ordinary():
    module = layer()
    weight = guarded(module.weight, "weight", "model.layer")
    ones = torch.ones(2, 4)
    for made in (
        weight.clone(),
        ones @ weight.T,
        weight * 2,
        weight.to(torch.bfloat16),
        weight.norm(),
        weight.max(0)[0],
    ):
        assert type(made) is torch.Tensor
        made.zero_()
    total = torch.zeros(3, 4)
    total += weight
    total[0] = weight[1]
    torch.testing.assert_close(total[1:], module.weight.detach()[1:], rtol=0, atol=0)
    torch.testing.assert_close(total[0], module.weight.detach()[1], rtol=0, atol=0)
    expected = ones @ module.weight.detach().T
    assert torch.equal(torch.nn.functional.linear(ones, weight), expected)
    assert weight.shape == (3, 4)
    assert [float(value) for value in weight[0]] == weight.tolist()[0]


def test_methods_that_give_tensors_give_such():
    module = layer()
    state = guarded(module.state_dict, "state_dict", "model.layer")()
    (name, weight), *_ = guarded(module.named_parameters, "named_parameters", "model.layer")()
    bias = list(guarded(module.parameters, "parameters", "model.layer")())[1]
    assert name == "weight"
    for tensor in (state["weight"], weight, bias):
        with pytest.raises(IsolationError):
            tensor.zero_()


@pytest.mark.parametrize("name", sorted(CHANGING))
def test_methods_that_change_a_module_are_refused(name: str):
    with pytest.raises(IsolationError, match=rf"model.layer.{name}\(\) would change a module"):
        guarded(getattr(layer(), name), name, "model.layer")


def test_the_cache_of_everyone_is_not_for_blocks():
    with pytest.raises(IsolationError, match="keys and values of all requests"):
        guarded(torch.zeros(1), "kv_cache", "model.attn")


def test_other_attributes_are_as_they_are():
    assert guarded(4, "in_features", "model.layer") == 4
    assert guarded(torch.relu, "act", "model.layer") is torch.relu
