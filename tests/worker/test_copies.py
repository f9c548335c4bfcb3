"""Graphs that copy what passes at taps, without a device: what is read after a replay is what is read in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight_async.interleave.interleaver import Interleaver
from nnsight_async.interleave.rows import Batch, Span
from nnsight_async.worker.copies import Copies
from tests.interleave.toy import WIDTH, Bench, order_of
from tests.worker.tape import Tape
from tests.worker.test_stops import ROWS, TAPS, Called, Turned, at, location, reads, steps


class Copied(Bench):
    """The toy in a graph that copies what passes at taps."""

    def __init__(self, taps: list[Any], model: torch.nn.Module | None = None) -> None:
        super().__init__()
        if model is not None:
            self.model = model
            self.interleaver = Interleaver(model, order_of(model), self._report)
        self.input = torch.zeros(ROWS, WIDTH)
        self.copies = Copies(self.interleaver, taps, 2 * ROWS)
        self.tape = Tape()
        with torch.inference_mode(), self.copies.reported():
            self.copies.begin(ROWS)
            self.model(self.input)
            self.copies.warm()
            with self.tape:
                self.output = self.model(self.input)

    def pass_(self, inputs: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        spans = {self.runs[key]: Span(row, row + 1) for row, key in enumerate(inputs) if key in self.runs}
        with torch.inference_mode():
            self.interleaver.begin_step(spans, Batch(ROWS, len(inputs) > 1))
            self.interleaver.share()
            self.input[: len(inputs)] = torch.cat(list(inputs.values()))
            self.tape.replay()
            self.copies.pass_on(ROWS)
            self.interleaver.end_step()
            return {key: self.output[row].clone() for row, key in enumerate(inputs)}


def entries(model: Any, tracer: Any) -> None:
    for _ in tracer.iter[:]:
        tracer.save(location("layers.1.mlp"), "mlp")
        tracer.save(location("layers.2.mlp")[0, :3], "part")


def test_what_is_read_is_what_passes() -> None:
    probes = [reads, None, entries, reads]
    graph, called = Copied(TAPS), Called()

    torch.testing.assert_close(steps(graph, probes), steps(called, probes))
    assert graph.copies.serves(TAPS[:3])
    assert not graph.copies.serves([at("layers.0.mlp")])
    assert [run.error for run in graph.runs.values()] == [None] * 3
    assert len(graph.reports) == len(called.reports) == 9
    for (*ours, found, _), (*expected, wanted, _) in zip(graph.reports, called.reports, strict=True):
        assert ours == expected
        values = [{entry.name: entry.value for entry in entries} for entries in (found, wanted)]
        assert len(values[0]) == 2
        torch.testing.assert_close(*values)


@pytest.fixture
def twice() -> torch.nn.Module:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.inner(self.inner(hidden))

    return Twice()


def test_what_passes_more_than_once_is_not_served(twice: torch.nn.Module) -> None:
    assert not Copied([at("inner")], twice).copies.serves([at("inner")])
    assert Copied([at("")], twice).copies.serves([at("")])


def test_what_is_not_laid_out_by_rows_is_not_served() -> None:
    assert not Copied([at("turn")], Turned()).copies.serves([at("turn")])
