"""What a block that came as data may compute: nothing that takes gigabytes or minutes is begun."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, cast

import torch

from nnsight_async.tree.envoy import Envoy

LARGEST = 1 << 27
"""Elements of one value."""
MOST_WORK = 1 << 37
"""Multiplications of one product of matrices."""
WIDEST = 4096
"""Bits of an integer."""
LONGEST = 1 << 16
"""Items of a list, and of what is gone through one by one."""
MOST_PARTS = 4096
"""Values in a list that is put into another: shared ones count every time, for so often are they sent."""

NUMBERS = (torch.Tensor, int, float)


def check_operands(sign: str, left: Any, right: Any) -> None:
    if sign in ("==", "!=") and all(value is None or isinstance(value, (str, int, float)) for value in (left, right)):
        return
    as_number(left)
    as_number(right)
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if sign == "@":
            check_product(left, right)
        else:
            room(broadcast([left, right]))


def check_product(*tensors: torch.Tensor) -> None:
    left, right = tensors if len(tensors) == 2 else (tensors[0], tensors[0])
    if not left.ndim or not right.ndim:
        return  # which torch refuses
    rows = left.numel() // max(left.shape[-1], 1)
    columns = right.numel() // max(right.shape[-2 if right.ndim > 1 else -1], 1)
    batch = max(math.prod(left.shape[:-2]), math.prod(right.shape[:-2]), 1)
    room(rows * columns * batch if batch > 1 else rows * columns)
    if rows * columns * left.shape[-1] > MOST_WORK:
        raise ValueError("a product of matrices this large is more than a block that is data may compute")


def check_index(whole: Any, keys: Any) -> None:
    """What `whole[keys]` will take, where tensors or lists choose elements."""
    if not isinstance(whole, (torch.Tensor, list, tuple, dict)):
        raise TypeError(f"{type(whole).__name__} has no items in a block that is data")
    if not isinstance(whole, torch.Tensor):
        return
    each = cast("tuple[Any, ...]", keys if isinstance(keys, tuple) else (keys,))
    choosing = [(at, key) for at, key in enumerate(each) if isinstance(key, (torch.Tensor, list))]
    if choosing and whole.numel():
        chosen = math.prod(count(key) for _, key in choosing)
        known = len(choosing) == 1 and ... not in [key for key in each if key is ...] and choosing[0][0] < whole.ndim
        size = whole.shape[choosing[0][0]] if known else min(whole.shape)
        room(chosen * whole.numel() // max(size, 1))


def check_parts(values: Sequence[Any], whole: Any = None) -> None:
    """Lists in lists stay small, and none, such as the `whole` that `values` are put into, is in itself."""
    waiting, count = list(values), 0
    while waiting:
        value = waiting.pop()
        count += 1
        if count > MOST_PARTS or (whole is not None and value is whole):
            raise ValueError(f"a list of more than {MOST_PARTS} values in one another")
        if isinstance(value, (list, tuple)):
            waiting += cast("list[Any]", value)
        elif isinstance(value, dict):
            waiting += cast("dict[Any, Any]", value).values()


def check_applied(values: Sequence[Any]) -> None:
    """What modules will make of tensors: as many rows, as wide as the largest of their weights."""
    most = max((rows(value) for value in values if isinstance(value, torch.Tensor)), default=0)
    room(most * max((width(value) for value in values if isinstance(value, Envoy)), default=1))


def rows(tensor: torch.Tensor) -> int:
    return tensor.numel() // max(tensor.shape[-1] if tensor.ndim and tensor.is_floating_point() else 1, 1)


def width(module: Envoy) -> int:
    manifest, path = module.__block_owner__, module.__block_reference__()[1]
    within = [info for name, info in manifest.modules.items() if name == path or name.startswith(f"{path}.")]
    return max((max(part.full_shape, default=1) for info in within for part in info.parameters), default=1)


def count(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel()
    return len(value) if isinstance(value, (list, tuple)) else 1  # pyright: ignore[reportUnknownArgumentType]


def broadcast(tensors: Sequence[torch.Tensor]) -> int:
    """Elements of what comes of an operation on them. (`torch.broadcast_shapes` imports SymPy, which takes seconds.)"""
    dimensions = zip_longest(*(reversed(tensor.shape) for tensor in tensors), fillvalue=1)
    return math.prod(0 if 0 in sizes else max(sizes) for sizes in dimensions)


def room(elements: int) -> None:
    if elements > LARGEST:
        raise ValueError(f"a value of {elements:,} elements; a block that is data may have {LARGEST:,}")


def fits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        room(value.numel())
    elif isinstance(value, int) and value.bit_length() > WIDEST:
        raise OverflowError(f"an integer of more than {WIDEST} bits")
    return value


def as_number(value: Any) -> Any:
    if not isinstance(value, NUMBERS):
        raise TypeError(f"tensors and numbers can be computed with in a block that is data, not {type(value).__name__}")
    return value


def as_tensor(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"this is for tensors, and not for a value of type {type(value).__name__}")
    return value
