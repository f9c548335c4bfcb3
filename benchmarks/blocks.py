"""The blocks that are measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.columns import Work

Probe = Callable[[Any, Any], object]


def probe(model: Any, work: Work) -> Probe:
    """The block of a column, for whatever the model calls its decoder layers; "edit" adds to one layer in place."""
    layers = _layers(model)
    middle = layers[len(layers) // 2]
    if work == "edit":
        return _edit(middle)
    return _one(middle) if work == "one" else _every(layers)


def taps(repo: str, *, every: bool) -> list[str]:
    """Where the blocks look: at the middle layer, or at every one."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(repo)
    path = "transformer.h" if config.model_type == "gpt2" else "model.layers"
    return [f"{path}[*].output" if every else f"{path}[{config.num_hidden_layers // 2}].output"]


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
