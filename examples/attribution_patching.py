"""Which streams matter for an answer, at every layer and position, from two forward passes and one backward pass.

Attribution patching estimates what activation patching measures one place at a time: the effect of putting the value of
the clean run into the corrupted one is about (clean - corrupted) times the gradient, to first order.
"""

from __future__ import annotations

from typing import Any

import torch
from launch import launch_local

from nnsight_async import save

CLEAN, CORRUPTED = "The capital of France is", "The capital of Italy is"


def main(model: Any, clean: str = CLEAN, corrupted: str = CORRUPTED) -> torch.Tensor:
    """The estimated effect on the logit difference of the two answers, `[layers, positions]`, counted from the end."""
    layers = model.model.layers
    with model.trace() as tracer:
        with tracer.invoke(clean):
            good = save([layer.resid_post for layer in layers])
            right = model.logits.argmax(-1).save()
        with tracer.invoke(corrupted):
            wrong = model.logits.argmax(-1).save()

    with model.trace(corrupted):
        bad = [layer.resid_post for layer in layers]
        (model.logits[0, right] - model.logits[0, wrong]).sum().backward()
        last = min(len(good[0]), len(bad[0]))
        effects = [
            ((one[-last:] - other[-last:]) * other.grad[-last:]).sum(-1) for one, other in zip(good, bad, strict=True)
        ]
        grid = torch.stack(effects).detach().save()

    for number, row in enumerate(grid):
        print(f"layer {number:>2}  " + " ".join(f"{value:+.3f}" for value in row.tolist()))
    return grid


if __name__ == "__main__":
    launch_local(main, __doc__)
