"""What a block that came as data may compute: nothing that takes gigabytes or minutes is begun."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, cast

import torch

from nnsight_async.tree.envoy import Envoy
from nnsight_async.tree.manifest import Manifest, ModuleInfo

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

MOST_DIFFERENCES = 64
"""How often neighbours are subtracted."""

NUMBERS = (torch.Tensor, int, float)
MASKS = (torch.bool, torch.uint8)


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
    rows = extent(left) // max(left.shape[-1], 1)
    columns = extent(right) // max(right.shape[-2 if right.ndim > 1 else -1], 1)
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
    rest = whole.ndim - sum(_dimensions(key) for key in each)
    size, at = extent(whole), 0
    for key in each:
        over = whole.shape[at : at + _dimensions(key)]
        at += max(rest, 0) if key is ... else len(over)
        if isinstance(key, (list, tuple)):
            _check_numbers(cast("Sequence[Any]", key), over)
        elif isinstance(key, torch.Tensor) and key.dtype not in MASKS and key.numel():
            _check_range(int(key.min()), int(key.max()), over)
        if isinstance(key, (torch.Tensor, list, tuple)):
            size = size // max(math.prod(over), 1) * count(key)
    room(size)


def _dimensions(key: Any) -> int:
    """How many dimensions a key is for."""
    if isinstance(key, torch.Tensor) and key.dtype in MASKS:
        return key.ndim
    return 0 if key is None or key is ... or isinstance(key, bool) else 1


def _check_numbers(key: Sequence[Any], over: Sequence[int]) -> None:
    if not all(isinstance(number, int) for number in key):
        raise TypeError("a list that chooses elements is one of whole numbers in a block that is data")
    if key:
        _check_range(min(key), max(key), over)


def _check_range(least: int, most: int, over: Sequence[int]) -> None:
    """On a GPU an index that is out of range ends the process, and not this block alone."""
    if over and not -over[0] <= least <= most < over[0]:
        raise IndexError(f"index {most if most >= over[0] else least} is out of bounds for a dimension of {over[0]}")


def check_items(arguments: Sequence[Any]) -> None:
    """What `sum`, `max` and `min` go through: numbers, and tensors which together are not too large."""
    items = [
        as_number(item)
        for argument in arguments
        for item in (cast("list[Any]", argument) if isinstance(argument, (list, tuple)) else [argument])
    ]
    room(broadcast([item for item in items if isinstance(item, torch.Tensor)]))


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
    modules = [value for value in values if isinstance(value, Envoy)]
    room(most * max(map(width, modules), default=1))
    tables = [info for module in modules for info in _within(module) if "Embedding" in info.cls]
    known = min((part.full_shape[0] for info in tables for part in info.parameters if part.full_shape), default=None)
    ids = [value for value in values if isinstance(value, torch.Tensor) and not value.is_floating_point()]
    if known is not None and any(not 0 <= int(each.min()) <= int(each.max()) < known for each in ids if each.numel()):
        raise IndexError(f"an embedding takes whole numbers from 0 to {known - 1}")  # others end a GPU's process


def rows(tensor: torch.Tensor) -> int:
    return extent(tensor) // max(tensor.shape[-1] if tensor.ndim and tensor.is_floating_point() else 1, 1)


def width(module: Envoy) -> int:
    return max((max(part.full_shape, default=1) for info in _within(module) for part in info.parameters), default=1)


def _within(module: Envoy) -> list[ModuleInfo]:
    manifest: Manifest = module.__block_owner__
    path = module.__block_reference__()[1]
    return [info for name, info in manifest.modules.items() if name == path or name.startswith(f"{path}.")]


def count(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return extent(value)
    return len(value) if isinstance(value, (list, tuple)) else 1  # pyright: ignore[reportUnknownArgumentType]


def extent(tensor: torch.Tensor) -> int:
    """Elements of a tensor, or, of an empty one, what sums over its empty dimensions have, and products with it."""
    return tensor.numel() or math.prod(max(size, 1) for size in tensor.shape)


def broadcast(tensors: Sequence[torch.Tensor]) -> int:
    """Elements of what comes of an operation on them. (`torch.broadcast_shapes` imports SymPy, which takes seconds.)"""
    dimensions = zip_longest(*(reversed(tensor.shape) for tensor in tensors), fillvalue=1)
    return math.prod(1 if 0 in sizes else max(sizes) for sizes in dimensions)


def room(elements: int) -> None:
    if elements > LARGEST:
        raise ValueError(f"a value of {elements:,} elements; a block that is data may have {LARGEST:,}")


def fits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        room(extent(value))
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
    if not value.numel():
        room(extent(value))
    return value
