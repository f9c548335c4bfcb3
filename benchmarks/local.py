"""`python -m benchmarks.local`: what a trace on a `TransformersModel` takes, beside a forward pass with torch hooks.

The model is so small that a forward pass takes little, and what is ours shows. nnsight is measured too, on a model with
the same weights and in turns with the others, where it can be imported: this package does not depend on it.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.report import markdown
from nnsight_async import TransformersModel, save

LAYERS = 16
"""So many locations are read by the block that reads most; the other one reads one."""

IDS = [5, 17, 101, 9, 33, 250, 77, 12]
Found = Mapping[str, Mapping[int, Sequence[float]]]
Contender = Callable[[int], object]


def tiny(width: int = 64) -> Any:
    """A Llama of random weights, whose forward pass is nearly nothing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def bare(model: Any) -> Contender:
    """A forward pass, and the likeliest token."""
    ids = torch.tensor([IDS])

    def run(reads: int) -> object:
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1)

    return run


def hooked(model: Any) -> Contender:
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


def traced(model: TransformersModel) -> Contender:
    """A trace that reads so many locations, a copy of each, and saves them."""

    def run(reads: int) -> object:
        with model.trace(IDS):
            found = save([layer.output for layer in model.model.layers[:reads]])
        return found  # noqa: RET504  bound by the trace

    return run


def traced_by_nnsight(module: Any) -> Contender:
    """The same, where what is read is the tensor itself."""
    import nnsight

    model, ids = nnsight.NNsight(module), torch.tensor([IDS])

    def run(reads: int) -> object:
        with torch.no_grad(), model.trace(ids, use_cache=False):
            found = nnsight.save([layer.output for layer in model.model.layers[:reads]])
        return found  # noqa: RET504  bound by the trace

    return run


def measure(contenders: Mapping[str, Contender], repeats: int, number: int) -> dict[str, dict[int, list[float]]]:
    """CPU seconds a call, of all threads, by contender and number of reads, for each repeat. All take turns, so that a
    machine that slows down slows all of them."""
    counts = (1, LAYERS)
    found: dict[str, dict[int, list[float]]] = {name: {reads: [] for reads in counts} for name in contenders}
    for run in contenders.values():
        for reads in counts * 5:
            run(reads)
    gc.collect()
    for _ in range(repeats):
        for name, run in contenders.items():
            for reads in counts:
                start = time.process_time()
                for _ in range(number):
                    run(reads)
                found[name][reads].append((time.process_time() - start) / number)
    return found


def row(found: Found, name: str) -> list[str]:
    """Milliseconds with one read and with many; how many more than hooks a trace takes, and microseconds of each
    further read: all of the fastest repeats, because other work on the machine only ever adds."""
    fastest = {other: [1e3 * min(found[other][reads]) for reads in (1, LAYERS)] for other in (name, "hooks")}
    one, many = fastest[name]
    trace = "" if name in ("bare", "hooks") else f"{one - fastest['hooks'][0]:.2f}"
    read = "" if name == "bare" else f"{1e3 * (many - one) / (LAYERS - 1):.0f}"
    return [f"{one:.2f}", name, f"{many:.2f}", trace, read]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.local")
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--number", type=int, default=10, help="traces in a repeat")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with TransformersModel(tiny()) as model:
        contenders = {"bare": bare(model.module), "hooks": hooked(model.module), "nnsight_async": traced(model)}
        if find_spec("nnsight") is not None:
            contenders[f"nnsight {version('nnsight')}"] = traced_by_nnsight(tiny())
        found = measure(contenders, options.repeats, options.number)
    header = ["ms, 1 read", "", f"ms, {LAYERS} reads", "ms a trace over hooks", "us a further read"]
    print(f"CPU time; a Llama of {LAYERS} layers, {len(IDS)} tokens; the fastest of {options.repeats} repeats\n")
    print(markdown(header, [row(found, name) for name in contenders]))


if __name__ == "__main__":
    main()
