"""What a test compares with: greedy generation in transformers, by full forward passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

Edit = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Generation:
    """`ids` drawn, `logits` `[steps, vocab]`, and by layer the residual stream after it `[tokens, width]`."""

    ids: list[int]
    logits: torch.Tensor
    streams: list[torch.Tensor]


@torch.no_grad()
def generation(hf: Any, prompt: Sequence[int], steps: int, edits: Mapping[int, Edit] | None = None) -> Generation:
    """Greedy generation of a Llama, with the output of the layers in `edits` replaced in every pass."""
    ids, logits, streams = list(prompt), [], [torch.empty(0)] * len(hf.model.layers)
    with ExitStack() as hooks:
        for number, layer in enumerate(hf.model.layers):
            hook = _hook(streams, number, (edits or {}).get(number))
            hooks.callback(layer.register_forward_hook(hook).remove)
        for _ in range(steps):
            logits.append(hf(torch.tensor([ids])).logits[0, -1])
            ids.append(int(logits[-1].argmax()))
    return Generation(ids[len(prompt) :], torch.stack(logits), list(streams))


def _hook(streams: list[torch.Tensor], number: int, edit: Edit | None) -> Callable[..., Any]:
    def hook(module: torch.nn.Module, args: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        edited = hidden if edit is None else edit(hidden)
        streams[number] = edited[0]
        return (edited, *output[1:]) if isinstance(output, tuple) else edited

    return hook
