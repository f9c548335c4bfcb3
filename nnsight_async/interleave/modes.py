"""Modes of torch that live in the thread: a block must not leave one switched on when it hands the thread back."""

# torch offers no public way to look at its mode stacks.
# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

# Looked up once: every turn of a block asks all of them.
_inference = torch.is_inference_mode_enabled
_functions: Callable[[], int] = torch._C._len_torch_function_stack
_dispatchers: Callable[[], int] = torch._C._len_torch_dispatch_stack
_autocast = torch.is_autocast_enabled
_streams = hasattr(torch._C, "_cuda_getCurrentRawStream")
_dtype = torch.get_default_dtype
_on_cuda: Callable[[], bool] = torch.cuda.is_initialized
_device: Callable[[], int] = torch.cuda.current_device
_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)


MODES_CHANGED = (
    "a block waited for a location, or ended, with a mode of torch switched (inference mode, autocast, a default "
    "device or dtype, ...); close every `with torch....:` before the next location is read"
)


class Modes(NamedTuple):
    """The state that vLLM's forward pass depends on and that code of a block could change (torch 2.11, 2.13)."""

    inference: bool
    functions: int
    dispatchers: int
    autocast: bool
    autocast_cuda: bool
    stream: int
    dtype: torch.dtype

    @staticmethod
    def now() -> Modes:
        stream = _stream(_device()) if _streams and _on_cuda() else 0
        found = _inference(), _functions(), _dispatchers(), _autocast("cpu"), _autocast(), stream, _dtype()
        return tuple.__new__(Modes, found)  # at each turn twice: without the detour by keywords

    def restore(self) -> None:
        """Undo what a block left behind that no `with` undoes, such as `torch.set_default_device`."""
        while torch._C._len_torch_function_stack() > self.functions:
            torch._C._pop_torch_function_stack()
        while torch._C._len_torch_dispatch_stack() > self.dispatchers:
            torch._C._pop_torch_dispatch_stack()
        torch.set_autocast_enabled("cpu", self.autocast)
        torch.set_autocast_enabled("cuda", self.autocast_cuda)
        if self.stream:
            torch.cuda.set_stream(torch.cuda.ExternalStream(self.stream))  # pyright: ignore[reportUnknownMemberType]
        torch.set_default_dtype(self.dtype)
