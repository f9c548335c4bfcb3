"""Random numbers of blocks, where those of the model have to stay the same on every rank."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
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


class OwnRandomness:
    """Every run draws from generators of its own: the same wherever its block runs."""

    def __init__(self) -> None:
        self._states: dict[object, tuple[Any, ...]] = {}

    @contextmanager
    def of(self, run: object, seed: int) -> Generator[None]:
        """What is drawn from here on is drawn for `run`."""
        before = _states()
        _have(self._states.get(run) or _seeded(seed))
        try:
            yield
        finally:
            self._states[run] = _states()
            _have(before)

    def forget(self, run: object) -> None:
        self._states.pop(run, None)


def _states() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _seeded(seed: int) -> tuple[Any, ...]:
    states = torch.Generator().manual_seed(seed).get_state(), random.Random(seed).getstate()
    return *states, np.random.RandomState(seed % (1 << 32)).get_state()


def _have(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
