"""Has tensors count how often they are changed in place, which those made in inference mode do not."""

# torch's counters have no public names.
# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, cast

import torch

_swap: Any = torch.utils.swap_tensors  # pyright: ignore[reportUnknownMemberType]


def counting(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among `values`, and in tuples, that count their changes from here on, also through views made later.

    An inference tensor becomes an ordinary one of the same memory; it stays the same object (torch 2.11, 2.13). Where
    that cannot be, it is left out.
    """
    tensors = list(_tensors(values))
    uncounted = [tensor for tensor in tensors if tensor.is_inference()]
    if uncounted:
        with torch.inference_mode(False), torch.no_grad():
            twins = [_twin(tensor) for tensor in uncounted]
        for tensor, twin in zip(uncounted, twins, strict=True):
            if twin is not None:
                with suppress(RuntimeError):  # a weak reference to it, or somebody in C++ who holds it
                    _swap(tensor, twin)
        tensors = [tensor for tensor in tensors if not tensor.is_inference()]
    return tensors


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """How often each was changed."""
    return [tensor._version for tensor in tensors]


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(cast("tuple[Any, ...]", value))


def _twin(tensor: torch.Tensor) -> torch.Tensor | None:
    """An ordinary tensor of the same memory, where there is nothing to a tensor but its memory."""
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not vars(tensor)
    if not plain or tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_meta:
        return None
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())  # pyright: ignore
