"""The blocks that are measured."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from benchmarks.columns import Work

Probe = Callable[[Any, Any], object]


def probe(model: Any, work: Work) -> Probe:
    """The block of a column, for whatever the model calls its decoder layers; "edit" adds to one layer in place."""
    layers = _layers(model)
    middle = layers[len(layers) // 2]
    if not work.startswith("python-"):
        return (_said_of_one if hasattr(model, "transformer") else _said)(layers, work)
    if work == "python-edit":
        return _edit(middle)
    return _one(middle) if work == "python-one" else _every(layers)


OPERATIONS = ("ops-one", "ops-distinct", "ops-every")


def operations(model: Any, work: Work) -> list[Any]:
    """The declared operations of a request: a vector of random numbers, added to the middle layer, or to every one."""
    layers = _layers(model)
    chosen = layers if work == "ops-every" else [layers[len(layers) // 2]]
    vector = torch.randn(_width(model.repo))
    return [model.steer(layer, vector, scale=0.1) for layer in chosen]


def layers_of(repo: str) -> str:
    """All decoder layers, as `op_sites=` names them."""
    return f"{_path(repo)[0]}[*]"


@cache  # reading it takes longer than a step, and every request needs it
def _width(repo: str) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(repo).hidden_size)


def _path(repo: str) -> tuple[str, int]:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(repo)
    return ("transformer.h" if config.model_type == "gpt2" else "model.layers"), config.num_hidden_layers


def taps(repo: str, *, every: bool) -> list[str]:
    """Where the blocks look: at the middle layer, or at every one."""
    path, layers = _path(repo)
    return [f"{path}[*].output" if every else f"{path}[{layers // 2}].output"]


def _said(layers: list[Any], work: Work) -> Probe:
    """For layers that return (hidden, residual)."""
    middle = layers[len(layers) // 2]

    def one(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            tracer.save(middle.output[0], "hidden")

    def every(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            for number, layer in enumerate(layers):
                tracer.save(layer.output[0], f"hidden.{number}")

    def edit(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            middle.output[0][:] += 1

    return {"one": one, "every": every, "edit": edit}[work]


def _said_of_one(layers: list[Any], work: Work) -> Probe:
    """For layers that return one tensor."""
    middle = layers[len(layers) // 2]

    def one(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            tracer.save(middle.output, "hidden")

    def every(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            for number, layer in enumerate(layers):
                tracer.save(layer.output, f"hidden.{number}")

    def edit(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            middle.output[:] += 1

    return {"one": one, "every": every, "edit": edit}[work]


def _one(layer: Any) -> Probe:
    def one(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            tracer.save(_hidden(layer.output), "hidden")

    return one


def _every(layers: list[Any]) -> Probe:
    def every(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            for number, layer in enumerate(layers):
                tracer.save(_hidden(layer.output), f"hidden.{number}")

    return every


def _edit(layer: Any) -> Probe:
    def edit(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            _hidden(layer.output)[:] += 1

    return edit


def _hidden(output: Any) -> Any:
    return output if hasattr(output, "shape") else output[0]


def _layers(model: Any) -> list[Any]:
    return list(model.transformer.h if hasattr(model, "transformer") else model.model.layers)
