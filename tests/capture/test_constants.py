"""Large tensors travel apart from the block, named by their content."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from nnsight_async.capture.block import Block
from nnsight_async.capture.constants import LARGE
from nnsight_async.capture.function import from_function
from nnsight_async.capture.load import load

SIDE = 1024  # SIDE * SIDE elements of one byte are just large


def block_of(value: Any) -> Block:
    return from_function(lambda model, tracer: value)


def arrived(block: Block, device: Any = None) -> Any:
    """What the block returns where it arrives."""
    contents = {constant.digest: constant.content for constant in block.constants}
    return load(block.payload, lambda reference: reference, device, lambda digest: contents[digest].clone())(None, None)


def counted(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).remainder(251).view(shape).to(dtype)


SHAPES = {
    "whole": counted(SIDE, SIDE),
    "transposed": counted(SIDE, SIDE).T,
    "some rows": counted(2 * SIDE, SIDE)[SIDE // 2 : SIDE],
    "every second column": counted(SIDE, SIDE)[:, ::2],
    "from an odd byte on": counted(SIDE * SIDE + 7, dtype=torch.uint8)[3:-1],
    "bfloat16": counted(SIDE, SIDE, dtype=torch.bfloat16),
    "float8": counted(SIDE, SIDE, dtype=torch.float8_e4m3fn),
    "bool": counted(SIDE, SIDE, dtype=torch.bool),
    "complex": counted(SIDE, SIDE, dtype=torch.complex64),
    "asks for gradients": counted(SIDE, SIDE).requires_grad_(),
    "a parameter": torch.nn.Parameter(counted(SIDE, SIDE)),
}


@pytest.mark.parametrize("tensor", SHAPES.values(), ids=SHAPES)
def test_a_large_tensor_arrives_as_it_was(tensor: torch.Tensor) -> None:
    block = block_of(tensor)
    (constant,) = block.constants
    there = arrived(block)

    assert len(block.payload) < 10_000
    assert constant.digest == hashlib.sha256(constant.buffer).digest()
    assert (type(there), there.dtype, there.stride()) == (type(tensor), tensor.dtype, tensor.stride())
    assert there.requires_grad == tensor.requires_grad
    assert torch.equal(torch.view_as_real(there.to(torch.complex64)), torch.view_as_real(tensor.to(torch.complex64)))


def test_a_large_tensor_is_cut_out_of_a_larger_one() -> None:
    rows = counted(8, SIDE, SIDE)[2]

    (constant,) = block_of(rows).constants

    assert constant.size == rows.nbytes
    assert torch.equal(constant.content.view(torch.float32).view(SIDE, SIDE), rows)


@pytest.mark.parametrize("shown", [lambda x: x[5, 7:9], lambda x: x[0, :1].expand(3, SIDE), lambda x: x[0, 0]])
def test_a_small_part_of_a_large_tensor_travels_alone(shown: Any) -> None:
    part = shown(counted(SIDE, SIDE))

    block = block_of(part)

    assert (block.constants, len(block.payload) < 10_000) == ((), True)
    assert torch.equal(arrived(block), part)
    assert arrived(block).stride() == part.stride()


def test_a_module_is_sent_without_its_weights() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(SIDE, SIDE), torch.nn.Linear(SIDE, 2))
    module[0].register_buffer("steps", torch.zeros(3))

    block = block_of(module)
    there = arrived(block)

    assert [constant.size for constant in block.constants] == [4 * SIDE * SIDE]
    assert there.state_dict().keys() == module.state_dict().keys()
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in there.state_dict().items())


def test_tied_weights_stay_tied() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(SIDE, SIDE), torch.nn.Linear(SIDE, SIDE))
    module[1].weight = module[0].weight

    there = arrived(block_of(module))

    assert there[1].weight is there[0].weight


def test_equal_tensors_are_one_constant_and_two_tensors() -> None:
    pair = torch.zeros(SIDE, SIDE), torch.zeros(SIDE, SIDE)

    block = block_of(pair)
    one, other = arrived(block)
    one += 1

    assert len(block.constants) == 1
    assert (int(one.sum()), int(other.sum())) == (SIDE * SIDE, 0)


def test_equal_content_is_the_same_constant_while_somebody_holds_it() -> None:
    tensor = counted(SIDE, SIDE)
    first, second, copy = (block_of(value).constants for value in (tensor, tensor, tensor.clone()))

    assert first == second == copy


CHANGES = {
    "in place": lambda tensor: tensor.add_(1),
    "through .data": lambda tensor: tensor.data.add_(1),
    "through a view": lambda tensor: tensor[-1].add_(1),
    "through NumPy": lambda tensor: tensor.numpy().__iadd__(1),
    "two rows swapped": lambda tensor: tensor.data.copy_(tensor.flip(0)),
    "in inference mode": torch.inference_mode()(lambda tensor: tensor.add_(1)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_tensor_is_another_constant_and_earlier_blocks_keep_theirs(change: Any) -> None:
    tensor = counted(SIDE + 1, SIDE)
    before, earlier = tensor.clone(), block_of(tensor)
    change(tensor)
    later = block_of(tensor)

    assert not torch.equal(tensor, before)
    assert torch.equal(arrived(earlier), before)
    assert torch.equal(arrived(later), tensor)


def test_nothing_is_kept_of_a_constant_that_nobody_holds() -> None:
    from nnsight_async.capture import constants

    tensor = counted(SIDE, SIDE)
    block = block_of(tensor)
    assert block.constants[0].digest in constants._by_digest

    digest = block.constants[0].digest
    del block

    assert digest not in constants._by_digest


class Named(torch.Tensor):
    pass


def test_a_tensor_that_is_more_than_its_bytes_travels_whole() -> None:
    marked, sub = counted(SIDE, SIDE), counted(SIDE, SIDE).as_subclass(Named)
    marked.label = "mine"

    block = block_of((marked, sub))
    there = arrived(block)

    assert block.constants == ()
    assert (there[0].label, type(there[1]).__name__) == ("mine", "Named")
    assert torch.equal(there[0], marked)


def test_the_parts_of_a_sparse_tensor_travel_apart() -> None:
    sparse = counted(SIDE, SIDE).to_sparse()

    block = block_of(sparse)

    assert len(block.constants) == 2
    assert torch.equal(arrived(block).to_dense(), sparse.to_dense())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint16, torch.float8_e4m3fn, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_small_tensors_of_every_dtype_arrive(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = counted(*shape, dtype=dtype)

    there = arrived(block_of(tensor))

    assert (there.dtype, there.shape, there.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert torch.equal(there.float(), tensor.float())
    there.zero_()
    assert arrived(block_of(tensor), device="meta").device.type == "meta"


def test_a_tensor_that_asks_for_gradients_is_a_leaf_on_the_device() -> None:
    there = arrived(block_of(torch.zeros(3).requires_grad_()), device="meta")

    assert (there.requires_grad, there.is_leaf) == (True, True)


def test_other_tensors_arrive_on_the_device_too() -> None:
    marked = torch.zeros(3)
    marked.label = "mine"

    assert arrived(block_of(marked), device="meta").device.type == "meta"


def test_the_boundary() -> None:
    small, large = torch.zeros(LARGE - 1, dtype=torch.uint8), torch.zeros(LARGE, dtype=torch.uint8)

    assert (len(block_of(small).constants), len(block_of(large).constants)) == (0, 1)
