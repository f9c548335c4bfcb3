"""Random numbers of blocks, where those of the model have to stay the same on every rank."""

from __future__ import annotations

import torch


class Randomness:
    """The generators of torch have two states: blocks draw from the one, and the forward pass from the other.

    Every rank of a tensor-parallel group draws its tokens itself (vLLM 0.32, 0.33), and they have to be the same.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        fresh = torch.Generator().manual_seed(torch.initial_seed() + 1)
        self._other: list[torch.Tensor] = [fresh.get_state()]
        if self._device is not None:
            self._other.append(torch.Generator(self._device).manual_seed(torch.initial_seed() + 1).get_state())

    def swap(self) -> None:
        """Have the other state."""
        now = [torch.get_rng_state()]
        torch.set_rng_state(self._other[0])
        if self._device is not None:
            now.append(torch.cuda.get_rng_state(self._device))
            torch.cuda.set_rng_state(self._other[1], self._device)
        self._other = now
