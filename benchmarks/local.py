"""`python -m benchmarks.local`: what a trace on a `TransformersModel` takes, beside a forward pass with torch hooks.

The model is so small that a forward pass takes little, and what is ours shows. `--peer PYTHON` has nnsight measured in
the environment of that interpreter, by the same code on the same model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.forwards import IDS, READS, bare, costs, hooked, measure, tiny
from benchmarks.report import markdown
from nnsight_async import TransformersModel, save

ROOT = Path(__file__).parents[1]
Found = Mapping[str, Mapping[str, Sequence[float]]]


def traced(model: TransformersModel) -> Callable[[int], object]:
    """A trace that reads so many locations, and saves them."""
    layers = list(model.model.layers)

    def run(reads: int) -> object:
        with model.trace(IDS):
            found = save([layer.output for layer in layers[:reads]])
        return found  # noqa: RET504  bound by the trace

    return run


def ours(repeats: int, number: int) -> Found:
    """Seconds a call in this process."""
    with TransformersModel(tiny()) as model:
        contenders = {"bare": bare(model.module), "hooks": hooked(model.module), "nnsight_async": traced(model)}
        return measure(contenders, repeats, number)


def peers(python: str, repeats: int, number: int) -> dict[str, Any]:
    """The same of nnsight, in the environment of another interpreter."""
    command = [python, "-m", "benchmarks.peer", "--repeats", str(repeats), "--number", str(number)]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


def rows(found: Found, version: str) -> list[list[str]]:
    """A row for each contender; `version` is that of torch."""
    made: list[list[str]] = []
    for name, times in found.items():
        one, many = (1e3 * statistics.median(times[str(reads)]) for reads in (1, READS))
        trace, read = costs(found, name, "hooks")
        over = "" if name in ("bare", "hooks") else f"{trace:.2f}"
        made.append([version, name, f"{one:.2f}", f"{many:.2f}", over, "" if name == "bare" else f"{read:.1f}"])
    return made


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.local")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--number", type=int, default=40, help="traces in a repeat")
    parser.add_argument("--peer", metavar="PYTHON", help="an interpreter whose environment has nnsight")
    options = parser.parse_args()
    torch.set_num_threads(1)
    made = rows(ours(options.repeats, options.number), torch.__version__)
    if options.peer is not None:
        told = peers(options.peer, options.repeats, options.number)
        made += rows(told["found"], told["torch"])
        print(f"nnsight {told['version']}")
    header = ["torch", "", "ms, 1 read", f"ms, {READS} reads", "ms a trace over hooks", "us a further read"]
    print(f"A Llama of {READS} layers, {len(IDS)} tokens; medians of {options.repeats} repeats of {options.number}\n")
    print(markdown(header, made))


if __name__ == "__main__":
    main()
