"""Copies of saved tensors from the accelerator to pinned memory, beside the model's own stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Staging:
    """Copies on a side stream, from a thread of its own; on the CPU there is nothing to do."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def mark(self) -> torch.cuda.Event | None:
        """Called on the model's thread: when what it has made so far is there."""
        if self._stream is None:
            return None
        made = torch.cuda.Event()
        made.record()
        return made

    @torch.inference_mode()
    def fetch(self, tensors: Sequence[torch.Tensor], made: torch.cuda.Event | None) -> list[torch.Tensor]:
        """Host tensors that hold what `tensors` do, after `made`. The caller keeps `tensors` until this returns: then
        their memory is read no more."""
        if self._stream is None or made is None:
            return list(tensors)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(made)
            hosts = [_host(tensor) for tensor in tensors]
            copied = torch.cuda.Event(blocking=True)  # one that is polled is in the way of the model's thread
            copied.record()
        copied.synchronize()
        return hosts


def _host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
