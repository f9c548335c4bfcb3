"""A model of transformers, its bare forward pass, and the same with torch hooks: what traces are compared with.

Nothing of this package is imported here: the environment of another one runs it too.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

READS = 16
"""So many locations are read by the block that reads most; the other one reads one."""

IDS = [5, 17, 101, 9, 33, 250, 77, 12]


def tiny(layers: int = READS, width: int = 64) -> Any:
    """A Llama of random weights, whose forward pass is nearly nothing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def bare(model: Any) -> Callable[[int], object]:
    """A forward pass, and the likeliest token."""
    ids = torch.tensor([IDS])

    def run(reads: int) -> object:
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1)

    return run


def hooked(model: Any) -> Callable[[int], object]:
    """The same with as many hooks as there are reads, put on, keeping a copy each, and taken off."""
    run, layers = bare(model), list(model.model.layers)

    def read(reads: int) -> object:
        found: list[torch.Tensor] = []

        def keep(module: Any, args: Any, output: torch.Tensor) -> None:
            found.append(output.clone())

        hooks = [layer.register_forward_hook(keep) for layer in layers[:reads]]
        run(0)
        for hook in hooks:
            hook.remove()
        return found

    return read


def measure(
    contenders: Mapping[str, Callable[[int], object]], repeats: int, number: int, counts: Sequence[int] = (1, READS)
) -> dict[str, dict[str, list[float]]]:
    """Seconds a call, by contender and number of reads, for each repeat. All take turns, so that a machine that slows
    down slows all of them."""
    found: dict[str, dict[str, list[float]]] = {name: {str(reads): [] for reads in counts} for name in contenders}
    for run in contenders.values():
        for reads in counts:
            for _ in range(5):
                run(reads)
    gc.collect()
    for _ in range(repeats):
        for name, run in contenders.items():
            for reads in counts:
                start = time.perf_counter()
                for _ in range(number):
                    run(reads)
                found[name][str(reads)].append((time.perf_counter() - start) / number)
    return found


def costs(found: Mapping[str, Mapping[str, Sequence[float]]], name: str, base: str) -> tuple[float, float]:
    """Milliseconds that a trace with one read takes over `base`, and microseconds that each further read takes: medians
    of the differences within a repeat."""
    one, many = "1", str(READS)
    traces = [1e3 * (ours - theirs) for ours, theirs in zip(found[name][one], found[base][one], strict=True)]
    reads = [
        1e6 * (most - least) / (READS - 1) for most, least in zip(found[name][many], found[name][one], strict=True)
    ]
    return statistics.median(traces), statistics.median(reads)
