"""What is told of a block before it runs: too much is allowed, too little is not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnsight_async.interleave.foresight import MOST_FUNCTIONS, Foresight, foresee


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
    "comprehension": lambda model, tracer: [value.mul_(2) for value in model.output],
}


@pytest.mark.parametrize("program", CHANGING.values(), ids=CHANGING)
def test_blocks_that_change_something(program):
    assert foresee(program).changes


def test_a_block_that_only_reads():
    assert foresee(reads) == Foresight(source=False, changes=False)


def test_blocks_that_speak_of_source():
    def block(model: Any, tracer: Any) -> None:
        tracer.save(model.layers[3].source.output, "x")

    assert foresee(block) == Foresight(source=True, changes=False)
    assert foresee(closed_over(lambda module: module.source)).source  # pyright: ignore


def test_of_more_code_than_is_looked_at_anything_is_expected():
    functions: list[Any] = [reads]
    for _ in range(MOST_FUNCTIONS + 1):
        text = f"def block(model, tracer):\n    inner(model, tracer)\n    return {len(functions)}"
        names: dict[str, Any] = {"inner": functions[-1], "__name__": "users"}
        exec(text, names)
        functions.append(names["block"])
    assert not foresee(functions[10]).changes
    assert foresee(functions[-1]).changes
