from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from nnsight_async.interleave.context import BlockGreenlet
from nnsight_async.tree.describe import describe
from nnsight_async.tree.manifest import Manifest

if TYPE_CHECKING:
    from collections.abc import Callable

    from nnsight_async.interleave.locations import Location


class Layer(torch.nn.Module):
    def __init__(self, act: torch.nn.Module) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(4)
        self.mlp = torch.nn.Linear(4, 4)
        self.act = act
        self.unused = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.mlp(self.norm(x)))


class Inner(torch.nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        act = torch.nn.GELU()
        self.embed = torch.nn.Embedding(7, 4)
        self.layers = torch.nn.ModuleList([Layer(act) for _ in range(layers)])
        self.output = torch.nn.Linear(4, 4)  # a child named as BERT names one

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        # Like vLLM's classes under @support_torch_compile: hooks of this module never fire.
        return self.forward(ids)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


class Toy(torch.nn.Module):
    scale = 3

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.model = Inner(layers)
        self.lm_head = torch.nn.Linear(4, 7, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(ids))


class Context:
    """Stands in for a running block: notes what is asked of it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.asked: list[Any] = []

    def read(self, location: Location) -> Any:
        self.asked.append(("read", str(location)))
        return str(location)

    def write(self, location: Location, value: Any) -> None:
        self.asked.append(("write", str(location), value))

    def module(self, path: str) -> torch.nn.Module:
        return self.model.get_submodule(path)

    def attribute(self, path: str, name: str, default: object) -> Any:
        return getattr(self.module(path), name, default)

    def call(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.module(path)(*args, **kwargs)


@pytest.fixture
def toy() -> Toy:
    return Toy()


@pytest.fixture
def manifest(toy: Toy) -> Manifest:
    return describe(toy, repo="toy", vllm_version="0")


@pytest.fixture
def context(toy: Toy) -> Context:
    return Context(toy)


@pytest.fixture
def in_block(context: Context) -> Callable[[Callable[[], Any]], Any]:
    """Runs a function as the code of a block whose context is `context`."""

    def run(function: Callable[[], Any]) -> Any:
        block = BlockGreenlet(function, context)
        return block.switch()

    return run
