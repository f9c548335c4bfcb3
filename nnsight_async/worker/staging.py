"""Copies of saved tensors from the accelerator to pinned memory, beside the model's own stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Staging:
    """Starts copies on a side stream; on the CPU there is nothing to do."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], torch.cuda.Event | None]:
        """Host tensors that are being filled with `tensors`, and the event after which they are full."""
        if self._stream is None:
            return list(tensors), None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.inference_mode():
            hosts = [self._copy(tensor) for tensor in tensors]
            event = torch.cuda.Event()
            event.record()
        return hosts, event

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cuda":
            return tensor
        assert self._stream is not None
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return host
