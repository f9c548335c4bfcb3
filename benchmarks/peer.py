"""`python -m benchmarks.peer`: traces of nnsight, in an environment that has it, as JSON for `benchmarks.local`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

import torch

from benchmarks.forwards import IDS, bare, hooked, measure, tiny


def traced() -> Callable[[int], object]:
    import nnsight

    model = nnsight.NNsight(tiny())
    layers, ids = list(model.model.layers), torch.tensor([IDS])

    def run(reads: int) -> object:
        with torch.no_grad(), model.trace(ids, use_cache=False):
            found = nnsight.save([layer.output for layer in layers[:reads]])
        return found  # noqa: RET504  bound by the trace

    return run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--number", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    import nnsight

    model = tiny()
    contenders = {"bare": bare(model), "hooks": hooked(model), "nnsight": traced()}
    found = measure(contenders, options.repeats, options.number)
    print(json.dumps({"version": nnsight.__version__, "torch": torch.__version__, "found": found}), file=sys.stdout)


if __name__ == "__main__":
    main()
