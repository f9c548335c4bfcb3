"""A small torch model, and one forward pass of it with blocks, for tests of the interleaver alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nnsight_async.interleave.block import BlockRun
from nnsight_async.interleave.interleaver import Interleaver, Limits
from nnsight_async.interleave.locations import LOGITS, SAMPLES, Location
from nnsight_async.interleave.order import Order
from nnsight_async.interleave.rows import Batch, Span

WIDTH = 8


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.mlp = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.mlp(self.norm(hidden))


class Toy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([Layer() for _ in range(3)])
        self.head = torch.nn.Linear(WIDTH, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def order_of(model: torch.nn.Module) -> Order:
    """The order of events, by ordinary torch hooks."""
    clock, entries, exits = iter(range(10_000)), {}, {}
    handles = []
    for path, module in model.named_modules():
        enter = lambda *_, p=path: entries.setdefault(p, []).append(next(clock))  # noqa: E731
        leave = lambda *_, p=path: exits.setdefault(p, []).append(next(clock))  # noqa: E731
        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    model(torch.zeros(1, WIDTH))
    for handle in handles:
        handle.remove()
    freeze = lambda found: {path: tuple(indices) for path, indices in found.items()}  # noqa: E731
    return Order(freeze(entries), freeze(exits))


class Bench:
    """Runs steps of the toy model for several requests with blocks."""

    def __init__(self, timeout: float = 120.0) -> None:
        self._timeout = timeout
        self.model = Toy().eval()
        self.reports: list[tuple[int, int, list[Any], bool]] = []
        self.interleaver = Interleaver(self.model, order_of(self.model), self._report, limits=Limits(16, 64))
        self.runs: dict[int, BlockRun] = {}

    def _report(self, run: BlockRun) -> None:
        self.reports.append((run.key, run.step, [] if run.error else run.saves.collect(), run.over))

    def add(self, key: int, program: Callable[[Any, Any], object], rows: int) -> BlockRun:
        run = BlockRun(key, self.interleaver, rows, timeout=self._timeout)
        run.program = program
        self.runs[key] = run
        return run

    def step(self, inputs: dict[int, torch.Tensor], replayed: dict[int, int] | None = None) -> dict[int, torch.Tensor]:
        """One forward pass over the inputs, by request; returns logits by request."""
        replayed, spans, at = replayed or {}, {}, 0
        for key, rows in inputs.items():
            again, run = replayed.get(key, 0), self.runs.get(key)
            if run is not None and (again or not run.over):
                position = 0 if again else run.position
                spans[run] = Span(at + again, at + len(rows), again, position)
            at += len(rows)
        with torch.inference_mode():
            self.interleaver.begin_step(spans, Batch(at, len(inputs) > 1))
            logits = self.model(torch.cat(list(inputs.values())))
            starts = torch.tensor([len(rows) for rows in inputs.values()]).cumsum(0)
            logits = logits[starts - 1]
            index = {self.runs.get(key): number for number, key in enumerate(inputs)}
            sampling = {run: Span(index[run], index[run] + 1) for run in spans}
            self.interleaver.begin_sampling(sampling, Batch(len(inputs), len(inputs) > 1))
            if LOGITS in self.interleaver.waiting:
                logits = self.interleaver.fire(LOGITS, logits)
            samples = logits.argmax(-1, keepdim=True)
            if SAMPLES in self.interleaver.waiting:
                samples = self.interleaver.fire(SAMPLES, samples)
            self.interleaver.end_step()
        self.samples = samples
        return {key: logits[number] for number, key in enumerate(inputs)}


def output(path: str) -> Location:
    return Location(path, "output")
