"""Operations of torch that are recorded once and run again on the same tensors, as a CUDA graph does on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Segment = Callable[[], object]


class Tape(TorchDispatchMode):
    """Records while it is entered. What a replay computes goes to where it went when it was recorded."""

    def __init__(self) -> None:
        super().__init__()
        self._segments: list[Segment] = []
        self.stops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self._segments.append(lambda: _put(found, func(*args, **(kwargs or {}))))
        return found

    def interrupt(self, stop: Segment) -> None:
        """Have every replay call `stop` here."""
        stop()
        self._segments.append(stop)
        self.stops += 1

    def replay(self) -> None:
        for segment in self._segments:
            segment()


def _put(there: Any, new: Any) -> None:
    for old, fresh in zip(tree_leaves(there), tree_leaves(new), strict=True):
        if isinstance(old, torch.Tensor) and old.data_ptr() != fresh.data_ptr():  # neither a view nor in place
            old.copy_(fresh)
