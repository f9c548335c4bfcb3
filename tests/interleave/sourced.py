"""Modules whose forwards hold what forwards hold, for tests of the operations inside them."""

from __future__ import annotations

import functools
from typing import Any

import torch

from nnsight_async.interleave.interleaver import Interleaver
from tests.interleave.toy import WIDTH, Bench, order_of

FACTOR = 2.0


def scale(x: torch.Tensor, factor: float = FACTOR) -> torch.Tensor:
    grown = torch.mul(x, factor)
    return shift(grown, by=1.0)


def shift(x: torch.Tensor, *, by: float) -> torch.Tensor:
    return torch.add(x, by)


def recorded(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def doubling() -> Any:
    doubler = functools.partial(torch.mul, other=2.0)

    class Closed(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return doubler(x)

    return Closed()


class Base(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x)


class Derived(Base):
    """`super()`, a private name, a default, a decorator, a comprehension, a loop and a branch that leaves early."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(WIDTH, WIDTH)

    @recorded
    @torch.no_grad()
    def forward(self, x: torch.Tensor, times: int = 3, *, early: bool = False) -> torch.Tensor:
        x = super().forward(x)
        x = self.lin(x)
        x = self.__secret(x)
        parts = [torch.cos(part) for part in x.split([WIDTH // 2, WIDTH // 2], dim=-1)]
        x = torch.cat(parts, dim=-1)
        for number in range(times):
            x = torch.tanh(x) + number
        if early:
            return torch.neg(x)
        x = scale(x)
        return x + torch.exp(torch.neg(x.abs()))

    def __secret(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


class Native(torch.nn.Module):
    """Hands on, as vLLM's CustomOp does."""

    def __init__(self) -> None:
        super().__init__()
        self._forward_method = self.forward_cpu

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward_method(*args, **kwargs)

    def forward_cpu(self, *args: Any, **kwargs: Any) -> Any:
        # A comment, and a docstring would do no harm either.
        return self.forward_native(*args, **kwargs)

    def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return torch.relu(x) if residual is None else torch.relu(x + residual)


class Heads(torch.nn.Module):
    """Flattens rows and heads, and makes a value without rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.reshape(-1, WIDTH // 2)
        size = len(heads)
        return torch.sum(heads) * 0 + torch.reshape(heads, (size // 2, WIDTH))


class Built(torch.nn.Module):
    """A forward that is not Python."""

    forward = torch.sigmoid


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.derived = Derived()
        self.closed = doubling()
        self.native = Native()
        self.heads = Heads()
        self.other = Derived()
        self.built = Built()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.derived(x)
        x = self.heads(self.native(self.closed(x)))
        return self.built(self.other(x, 2))


class SourceBench(Bench):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model().eval()
        self.interleaver = Interleaver(self.model, order_of(self.model), self._report)
