"""A lent tensor is like any other to its block, and what the block does to it reaches nobody else."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 -- its usual name
from torch import nn

from nnsight_async.interleave.lent import Lent, lend
from nnsight_async.interleave.shared import SharedTensor

COUNTED = torch.arange(16.0).view(4, 4)
X = torch.linspace(-1, 1, 8).view(2, 4)


@pytest.fixture
def content() -> Iterator[torch.Tensor]:
    """Sixteen floats, as bytes, which no test may change."""
    content = COUNTED.clone().view(-1).view(torch.uint8)
    yield content
    assert torch.equal(content.view(torch.float32).view(4, 4), COUNTED)


@pytest.fixture(params=[False, True], ids=["no_grad", "inference_mode"])
def mode(request: pytest.FixtureRequest) -> Iterator[None]:
    with torch.no_grad(), torch.inference_mode(request.param):
        yield


def borrowed(content: torch.Tensor) -> Lent:
    return lend(content).view(torch.float32).view(4, 4)


def linear(weight: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(4, 4)
    layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(torch.zeros(4))
    return layer


def steps(*calls: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], None]:
    def run(tensor: torch.Tensor) -> None:
        for call in calls:
            call(tensor)

    return run


def assign(tensor: torch.Tensor, place: Any, value: Any) -> None:
    tensor[place] = value


def through_earlier_views(tensor: torch.Tensor) -> None:
    row, turned = tensor[1], tensor.T
    row += 100
    assert turned[0, 1] == 104


def in_a_loop(tensor: torch.Tensor) -> None:
    for row in tensor:
        row.mul_(2)


def through_a_module(tensor: torch.Tensor) -> None:
    layer = linear(tensor)
    layer.weight.data[:, 1] += 5
    layer.load_state_dict({"weight": layer.weight * 3, "bias": layer.bias})
    layer.weight.data = layer.weight.data / 2
    tensor.copy_(layer.weight)


def with_an_optimizer(tensor: torch.Tensor) -> None:
    tensor.grad = torch.ones(4, 4)
    torch.optim.SGD([tensor], lr=0.5).step()


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda t: t.add_(1),
    "item": lambda t: assign(t, (2, 3), 9.0),
    "items": lambda t: assign(t, torch.tensor([0, 2]), 9.0),
    "mask": lambda t: assign(t, t > 3, 0.0),
    "row": lambda t: t[1].fill_(7),
    "transposed": lambda t: t.T[0].fill_(7),
    ".data": lambda t: t.data.div_(2),
    "detached": lambda t: t.detach().zero_(),
    "views from before": through_earlier_views,
    "loop": in_a_loop,
    "chunk": lambda t: t.chunk(2)[1].zero_(),
    "unbind": lambda t: t.unbind(1)[3].zero_(),
    "other dtype": lambda t: t.view(torch.int32)[0].zero_(),
    "contiguous": lambda t: t.contiguous().mul_(3),
    "to": lambda t: t.to(torch.float32).mul_(3),
    "out": lambda t: torch.add(X[0], 1, out=t[0]),
    "foreach": lambda t: torch._foreach_add_([t, t[0]], 1.0),
    "overload": lambda t: torch.ops.aten.mul_.Tensor(t, 2),
    "relu": lambda t: F.relu(t.sub_(5), inplace=True),
    "init": nn.init.zeros_,
    "max_norm": lambda t: F.embedding(torch.tensor([1, 2]), t, max_norm=1.0),
    "copy_": lambda t: t.copy_(t.flip(0)),
    "numpy": lambda t: t.numpy().__setitem__(0, 9.0),
    "asarray": lambda t: np.asarray(t).__setitem__(0, 9.0),
    "dlpack": lambda t: torch.from_dlpack(t).zero_(),
    "storage": lambda t: t.untyped_storage().fill_(0),
    "module": through_a_module,
    "optimizer": with_an_optimizer,
    "twice": steps(lambda t: t[0].add_(1), lambda t: t.mul_(2), lambda t: t.T[1].sub_(1)),
}


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_as_on_any_tensor_and_reaches_no_other_loan(content: torch.Tensor, change: Any) -> None:
    mine, other, plain = borrowed(content), borrowed(content), COUNTED.clone()

    change(mine)
    change(plain)

    assert not torch.equal(plain, COUNTED)
    assert torch.equal(mine, plain)
    assert torch.equal(other, COUNTED)


def with_a_copy(make: Callable[[nn.Linear], nn.Linear]) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(tensor: torch.Tensor) -> torch.Tensor:
        layer = linear(tensor)
        other = make(layer)
        assert type(other.weight) is nn.Parameter
        other.weight.data.zero_()
        return layer(X)

    return run


READINGS: dict[str, Callable[[torch.Tensor], Any]] = {
    "matmul": lambda t: X @ t,
    "linear": lambda t: F.linear(X, t, t[0]),
    "module": lambda t: linear(t)(X),
    "double": lambda t: linear(t).double()(X.double()),
    "einsum": lambda t: torch.einsum("ab,bc->ac", X, t),
    "cat": lambda t: torch.cat([t, X]),
    "layer_norm": lambda t: F.layer_norm(X, (4,), t[0], t[1]),
    "attention": lambda t: F.scaled_dot_product_attention(X[None], t[None], t[None]),
    "embedding": lambda t: F.embedding(torch.tensor([1, 2]), t),
    "topk": lambda t: t.topk(2).values,
    "sort": lambda t: t.sort(descending=True).indices,
    "max": lambda t: t.max(0).values,
    "where": lambda t: torch.where(t > 2, t, 0),
    "index": lambda t: t[torch.tensor([1, 3]), 1:],
    "arithmetic": lambda t: (2 * t - t**2) / (t + 1),
    "casts": lambda t: t.bfloat16() @ t.half().T.bfloat16(),
    "reshape": lambda t: t.reshape(2, 8)[..., None].expand(2, 8, 3),
    "cumsum": lambda t: t.cumsum(0),
    "with a weight of the model": lambda t: COUNTED.as_subclass(SharedTensor) @ t,
    "zeros_like": torch.zeros_like,
    "item": lambda t: torch.tensor([t[0, 1].item(), float(t.sum()), int(t[3, 3]), len(t)]),
    "tolist": lambda t: torch.tensor(t.tolist()),
    "iterated": lambda t: torch.stack([row.sum() for row in t]),
    "text": lambda t: (repr(t), str(t), f"{t[0, 1]:.2f}", t.shape, t.dtype, t.stride(), t.device, bool((t >= 0).all())),
    "deepcopied": with_a_copy(copy.deepcopy),
    "pickled": with_a_copy(lambda layer: pickle.loads(pickle.dumps(layer))),
    "state_dict": lambda t: linear(t).state_dict()["weight"],
}


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS)
def test_a_reading_is_as_of_any_tensor_and_copies_nothing(content: torch.Tensor, reading: Any) -> None:
    tensor = borrowed(content)

    got, expected = reading(tensor), reading(COUNTED.clone())

    assert torch.equal(got, expected) if isinstance(got, torch.Tensor) else got == expected
    assert shares(tensor, content)


def shares(tensor: torch.Tensor, content: torch.Tensor) -> bool:
    return torch.Tensor.data_ptr(tensor) == content.data_ptr()


def test_the_copy_is_made_once_and_only_for_the_loan_that_writes(content: torch.Tensor) -> None:
    mine, other = borrowed(content), borrowed(content)
    mine[0] = 1.0
    place = mine.data_ptr()
    mine[1] = 2.0

    assert mine.data_ptr() == place
    assert (shares(mine, content), shares(other, content)) == (False, True)


def test_what_is_computed_is_an_ordinary_tensor(content: torch.Tensor) -> None:
    tensor = borrowed(content)

    assert type(X @ tensor) is type(tensor + 1) is type(tensor.clone()) is torch.Tensor


def test_a_parameter_is_one(content: torch.Tensor) -> None:
    tensor = borrowed(content)

    assert isinstance(nn.Parameter(tensor), nn.Parameter)
    assert [name for name, _ in linear(tensor).named_parameters()] == ["weight", "bias"]


def test_gradients_come_through(content: torch.Tensor) -> None:
    layer, plain = linear(borrowed(content)), linear(COUNTED.clone())

    for each in (layer, plain):
        each(X).square().sum().backward()

    assert torch.equal(layer.weight.grad, plain.weight.grad)


def test_views_are_not_kept(content: torch.Tensor) -> None:
    tensor = borrowed(content)
    before = len(tensor.loan._tensors)
    for _ in range(100):
        X @ tensor.T[:, 1:]

    assert len(tensor.loan._tensors) == before


def test_data_that_was_exchanged_is_left_alone(content: torch.Tensor) -> None:
    tensor = borrowed(content)
    parameter = nn.Parameter(tensor)
    parameter.data = parameter.data * 2
    tensor[0] = -1.0

    assert torch.equal(parameter, COUNTED * 2)
    assert tensor[0].tolist() == [-1.0] * 4
