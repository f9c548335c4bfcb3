"""What is told of a block before it runs: too much is allowed, too little is not."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnsight_async.interleave.foresight import MOST_VALUES, Foresight, foresee


def reads(model: Any, tracer: Any) -> None:
    for step in tracer.iter[:]:
        hidden = model.layers[3].output[0]
        tracer.save(hidden[-1].norm() * 2 + step, "norm")
    tracer.save([hidden @ hidden.T, {"a": hidden.mean(0)}], "all")


def helps(model: Any, tracer: Any) -> None:
    zero(model.layers[3].output)


def zero(value: torch.Tensor) -> None:
    value[:] = 0


class Zeroing:
    def __call__(self, model: Any, tracer: Any) -> None:
        self.change(model.layers[3].output)

    def change(self, value: torch.Tensor) -> None:
        value.zero_()


def nested(model: Any, tracer: Any) -> None:
    def change(value: torch.Tensor) -> None:
        value *= 2

    change(model.output)


def closed_over(change: Callable[[Any], None]) -> Callable[[Any, Any], None]:
    return lambda model, tracer: change(model.output)


def partly(value: Any, model: Any, tracer: Any) -> None:
    torch.add(model.output, value, out=model.output)


def gives_other_data(model: Any, tracer: Any) -> None:
    model.output.data = torch.zeros(1)


def doubles(model: Any, tracer: Any) -> None:
    value = model.output
    value += value


def by_default(model: Any, tracer: Any, change: Any = zero) -> None:
    change(model.output)


class Holds:
    """Has what changes a tensor only as an attribute."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def __call__(self, model: Any, tracer: Any) -> None:
        self.part(model.output)


class Slotted:
    __slots__ = ("part",)

    def __init__(self, part: Any) -> None:
        self.part = part

    def __call__(self, model: Any, tracer: Any) -> None:
        self.part(model.output)


class Encoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.act = torch.nn.ReLU()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.act(self.linear(hidden)))


OPTIONS = {"inplace": True}
RELU = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(inplace=True))

CHANGING: dict[str, Any] = {
    "helper": helps,
    "object": Zeroing(),
    "method": Zeroing().change,
    "nested": nested,
    "closure": closed_over(zero),
    "partial": functools.partial(partly, 1),
    "data": gives_other_data,
    "augmented": doubles,
    "spelt out": lambda model, tracer: model.output.__setitem__(0, 1),
    "inplace": lambda model, tracer: torch.nn.functional.relu(model.output, inplace=True),
    "inplace by place": lambda model, tracer: torch.nn.functional.relu(model.output, True),
    "inplace in a dict": lambda model, tracer: torch.nn.functional.relu(model.output, **OPTIONS),
    "a module that works in place": lambda model, tracer: RELU(model.output),
    "one that is made in the block": lambda model, tracer: torch.nn.Hardtanh(-1.0, 1.0, True)(model.output),
    "default": by_default,
    "attribute": Holds(zero),
    "attribute of an attribute": Holds(Holds(Zeroing().change)),
    "list": closed_over([zero]),  # pyright: ignore
    "dict": closed_over({"zero": {"it": zero}}),  # pyright: ignore
    "slots": Slotted(zero),
    "operator": lambda model, tracer: operator.iadd(model.output, 1),
    "a function of the operator module": closed_over(operator.imul),  # pyright: ignore
    "a method of tensors": closed_over(torch.Tensor.add_),
    "NumPy": lambda model, tracer: model.output.numpy().fill(0),
    "comprehension": lambda model, tracer: [value.mul_(2) for value in model.output],
}


@pytest.mark.parametrize("program", CHANGING.values(), ids=CHANGING)
def test_blocks_that_change_something(program):
    assert foresee(program).changes


def test_a_block_that_only_reads():
    assert foresee(reads) == Foresight(source=False, changes=False)
    assert not foresee(closed_over(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))).changes
    assert not foresee(closed_over(Encoder())).changes
    assert not foresee(Holds({"texts": ["a"] * 100, "vector": torch.ones(3), "act": torch.nn.functional.gelu})).changes


def test_blocks_that_may_leave_a_mode_switched():
    def within(model, tracer):
        with torch.autocast("cpu"):
            return model.output

    autocast = torch.autocast("cpu")
    assert not foresee(reads).modes
    assert foresee(within).modes
    assert foresee(closed_over(within)).modes
    assert foresee(lambda model, tracer: torch.set_default_dtype(model.output.dtype)).modes
    assert foresee(lambda model, tracer: autocast).modes


def test_blocks_that_may_change_by_memory():
    assert not foresee(reads).memory
    assert foresee(lambda model, tracer: model.output.data.zero_()).memory
    assert foresee(closed_over(lambda value: value.numpy())).memory
    assert foresee(lambda model, tracer: torch.from_dlpack(model.output)).memory


def test_blocks_that_speak_of_source():
    def block(model: Any, tracer: Any) -> None:
        tracer.save(model.layers[3].source.output, "x")

    assert foresee(block) == Foresight(source=True, changes=False)
    assert foresee(closed_over(lambda module: module.source)).source  # pyright: ignore


def test_of_more_code_than_is_looked_at_anything_is_expected():
    functions: list[Any] = [reads]
    for _ in range(MOST_VALUES + 1):
        text = f"def block(model, tracer):\n    inner(model, tracer)\n    return {len(functions)}"
        names: dict[str, Any] = {"inner": functions[-1], "__name__": "users"}
        exec(text, names)
        functions.append(names["block"])
    assert not foresee(functions[10]).changes
    assert foresee(functions[-1]).changes
