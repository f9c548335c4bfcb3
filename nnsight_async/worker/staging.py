"""Copies of saved tensors from the accelerator to pinned memory, beside the model's own stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch

from nnsight_async.interleave.saving import Entry


class Staging:
    """Starts copies on a side stream; on the CPU makes them, since the block may go on to change what it saved."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, entries: Iterable[Entry]) -> torch.cuda.Event | None:
        """Replace every tensor on the accelerator by a host tensor that is being filled; the event marks the last."""
        if self._stream is None:
            for entry in entries:
                entry.value = _map(entry.value, torch.clone)
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.inference_mode():
            for entry in entries:
                entry.value = _map(entry.value, self._copy)
            event = torch.cuda.Event()
            event.record()
        return event

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cuda":
            return tensor
        assert self._stream is not None
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return host


def _map(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_map(item, function) for item in cast("list[Any]", value))
    if isinstance(value, dict):
        return {key: _map(item, function) for key, item in cast("dict[Any, Any]", value).items()}
    return value
