"""Saved values on their way to the caller, who is in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from nnsight_async.runs.frames import Entry


class Home:
    """Makes entries of one frame the caller's own: outside of any graph, where they are, and shared with nobody."""

    def __init__(self, *, may_change: bool) -> None:
        """`may_change`: the block may change in place what lies in lists and dicts that it has saved."""
        self._may_change = may_change
        self._given: set[int] = set()

    def __call__(self, name: str, operation: str, value: Any) -> Entry:
        inside = not isinstance(value, torch.Tensor) and self._may_change
        return name, operation, self._own(value, inside)

    def _own(self, value: Any, copy: bool) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, copy)
        if isinstance(value, (list, tuple)):
            items = [self._own(item, copy) for item in cast("list[Any]", value)]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, dict):
            return {key: self._own(item, copy) for key, item in cast("dict[Any, Any]", value).items()}
        return value

    def _tensor(self, tensor: torch.Tensor, copy: bool) -> torch.Tensor:
        if type(tensor) is not torch.Tensor:
            return tensor.detach().clone().as_subclass(torch.Tensor)
        tensor = tensor.detach()
        if tensor.is_meta:
            return tensor
        memory = tensor.untyped_storage()
        at, size = memory.data_ptr(), tensor.nbytes
        if copy or memory.nbytes() > size or at in self._given:
            tensor = tensor.clone()
            at = tensor.data_ptr()
        if size:
            self._given.add(at)
        return tensor
