"""Graphs that stop at taps, without a device: blocks in them do what they do where every module is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnsight_async import IsolationError, UnsupportedError
from nnsight_async.interleave.interleaver import Interleaver
from nnsight_async.interleave.locations import Location
from nnsight_async.interleave.rows import Batch, Span
from nnsight_async.interleave.views import StreamIn
from nnsight_async.worker import stops
from nnsight_async.worker.stops import Stops
from tests.interleave.toy import WIDTH, Bench, Toy, order_of
from tests.worker.tape import Tape

ROWS = 6
"""Of a recorded graph; requests have fewer, and the rest is padding."""


def at(path: str, kind: Any = "output", operation: str = "") -> Location:
    return Location(path, kind, operation)


class Recorded(Bench):
    """The toy in a graph that stops at taps."""

    def __init__(self, taps: list[Location], model: torch.nn.Module | None = None) -> None:
        super().__init__()
        if model is not None:
            self.model = model
            self.interleaver = Interleaver(model, order_of(model), self._report)
        self.taps = taps
        self.input = torch.zeros(ROWS, WIDTH)
        found = Stops(self.interleaver, taps)
        found.begin(ROWS)
        self.tape = Tape()
        with torch.inference_mode(), found.reported():
            self.interleaver.fire = found.watch  # type: ignore[method-assign]
            self.model(self.input)
            self.interleaver.fire = lambda event, value: found.stop(  # type: ignore[method-assign]
                event, value, self.tape.interrupt
            )
            with self.tape:
                self.output = self.model(self.input)

    def pass_(self, inputs: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """One replay over one row of each request; what comes out, by request."""
        spans = {self.runs[key]: Span(row, row + 1) for row, key in enumerate(inputs) if key in self.runs}
        with torch.inference_mode():
            self.interleaver.begin_step(spans, Batch(ROWS, len(inputs) > 1))
            self.interleaver.share()
            self.input[: len(inputs)] = torch.cat(list(inputs.values()))
            self.tape.replay()
            self.interleaver.end_step()
            return {key: self.output[row].clone() for row, key in enumerate(inputs)}


class Called(Bench):
    """The same, with every module called."""

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        super().__init__()
        if model is not None:
            self.model = model
            self.interleaver = Interleaver(model, order_of(model), self._report)

    def pass_(self, inputs: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        spans = {self.runs[key]: Span(row, row + 1) for row, key in enumerate(inputs) if key in self.runs}
        with torch.inference_mode():
            self.interleaver.begin_step(spans, Batch(len(inputs), len(inputs) > 1))
            out = self.model(torch.cat(list(inputs.values())))
            self.interleaver.end_step()
            return {key: out[row].clone() for row, key in enumerate(inputs)}


@pytest.fixture(autouse=True)
def one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the stream")


def location(path: str, kind: Any = "output") -> Any:
    from nnsight_async.interleave.context import current

    return current().read(at(path, kind))


def writes(path: str, kind: Any, value: Any) -> None:
    from nnsight_async.interleave.context import current

    current().write(at(path, kind), value)


def reads(model: Any, tracer: Any) -> None:
    for _ in tracer.iter[:]:
        tracer.save(location("layers.0"), "first")
        tracer.save(location("layers.2.mlp"), "last")


def in_place(model: Any, tracer: Any) -> None:
    for _ in tracer.iter[:]:
        location("layers.0")[:] *= 2
        location("layers.2.mlp")[:] += 1


def replaced(model: Any, tracer: Any) -> None:
    for step in tracer.iter[:]:
        if step:
            writes("layers.1.mlp", "output", torch.full((1, WIDTH), 0.5))


def of_one_consumer(model: Any, tracer: Any) -> None:
    """The layer holds what its norm is called with, and goes on from that."""
    for _ in tracer.iter[:]:
        (hidden,), _ = location("layers.1.norm", "inputs")
        hidden[:] = 0


def of_the_layer_too(model: Any, tracer: Any) -> None:
    """A stream that is changed in place, for whoever holds it."""
    from nnsight_async.interleave.context import current

    for _ in tracer.iter[:]:
        view = StreamIn.of(current().module("layers.1.norm"), middle=True)
        stream = current().read_view(at("layers.1.norm", "inputs"), view)
        stream[:] += 1


TAPS = [at("layers.0"), at("layers.2.mlp"), at("layers.1.mlp"), at("layers.1.norm", "inputs")]
PROBES: list[Callable[[Any, Any], object] | None] = [reads, in_place, None, replaced, of_one_consumer, of_the_layer_too]


def steps(bench: Any, probes: list[Any], number: int = 3) -> list[dict[int, torch.Tensor]]:
    draw = torch.Generator().manual_seed(7)
    inputs = [{key: torch.randn(1, WIDTH, generator=draw) for key in range(len(probes))} for _ in range(number)]
    for key, probe in enumerate(probes):
        if probe is not None:
            bench.add(key, probe, 1)
    return [bench.pass_(rows) for rows in inputs]


def test_blocks_in_a_graph_do_what_they_do_without() -> None:
    graph, called = Recorded(TAPS), Called()

    torch.testing.assert_close(steps(graph, PROBES), steps(called, PROBES))
    assert graph.tape.stops == len(TAPS)
    assert [run.error for run in graph.runs.values()] == [None] * 5
    ours, expected = graph.reports, called.reports
    assert len(ours) == len(expected) > 0
    assert str(ours) == str(expected)


@pytest.mark.parametrize("number", range(len(PROBES)))
def test_each_does_alone_what_it_does_among_others(number: int) -> None:
    graph = Recorded(TAPS)
    together = steps(Recorded(TAPS), PROBES)

    draw = torch.Generator().manual_seed(7)
    inputs = [{key: torch.randn(1, WIDTH, generator=draw) for key in range(len(PROBES))} for _ in range(3)]
    if PROBES[number] is not None:
        graph.add(number, PROBES[number], 1)  # type: ignore[arg-type]

    for rows, expected in zip(inputs, together, strict=True):
        torch.testing.assert_close(graph.pass_({number: rows[number]})[number], expected[number])


def test_nothing_happens_where_nobody_waits() -> None:
    graph = Recorded(TAPS)
    torch.testing.assert_close(steps(graph, [None] * 3), steps(Called(), [None] * 3))
    assert not graph.interleaver.waiting
    assert not graph.interleaver.sites.entered


class Mixer(torch.nn.Module):
    """Writes into an argument, as mixers of vLLM do."""

    def forward(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(hidden.cumsum(-1))


class Mixed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer = Mixer()
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)  # what it writes for a row of zeros
        self.mixer(hidden, out)
        return hidden + out * self.scale


def test_what_a_module_writes_into_an_argument_reaches_its_caller() -> None:
    def doubles(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            (hidden, _), _ = location("mixer", "inputs")
            hidden[:] *= 2

    graph, called = Recorded([at("mixer", "inputs")], Mixed()), Called(Mixed())

    torch.testing.assert_close(steps(graph, [doubles, None, None]), steps(called, [doubles, None, None]))


class Turned(torch.nn.Module):
    """Something that is not laid out by rows, and once more by chance where there are as many."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = torch.nn.Flatten(0, 0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.turn(hidden.T).T


def test_what_is_not_laid_out_by_rows_is_nobodys() -> None:
    def looks(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            tracer.save(location("turn"), "turned")

    graph = Recorded([at("turn")], Turned())
    run = graph.add(0, looks, 1)
    out = graph.pass_({0: torch.ones(1, WIDTH)})

    assert isinstance(run.error, IsolationError)
    torch.testing.assert_close(out[0], 2 * torch.ones(WIDTH))


def test_as_many_as_rows_by_chance_is_nobodys_either() -> None:
    toy = Turned()
    interleaver = Interleaver(toy, order_of(toy), lambda run: None)
    found, tapes = Stops(interleaver, [at("turn")]), {rows: Tape() for rows in (ROWS, WIDTH)}
    with torch.inference_mode(), found.reported():
        for rows, tape in tapes.items():
            stop = tape.interrupt
            interleaver.fire = lambda event, value, stop=stop: found.stop(event, value, stop)  # type: ignore[method-assign]
            found.begin(rows)
            hidden = torch.zeros(rows, WIDTH)
            with tape:
                toy(hidden)

    bench = Bench()
    bench.interleaver = interleaver
    run = bench.add(0, lambda model, tracer: tracer.save(location("turn"), "turned"), 1)
    with torch.inference_mode():
        interleaver.begin_step({run: Span(0, 1)}, Batch(WIDTH, False))
        interleaver.share()
        tapes[WIDTH].replay()
        interleaver.end_step()

    assert isinstance(run.error, IsolationError)


def test_a_tap_on_a_stream_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy()
    interleaver = Interleaver(toy, order_of(toy), lambda run: None)
    found = Stops(interleaver, [at("layers.1.mlp")])
    found.begin(ROWS)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "another")

    with (
        pytest.raises(UnsupportedError, match=r"layers\[1\]\.mlp\.output passes on a stream of its own"),
        found.reported(),
    ):
        toy(torch.zeros(ROWS, WIDTH))

    assert not interleaver.waiting
    assert not interleaver.sites.entered
    assert interleaver.fire == Interleaver.fire.__get__(interleaver)


def test_equal_bytes_are_equal_whatever_they_mean() -> None:
    nan = torch.tensor([[float("nan"), 1.0]])
    assert stops._same_bytes(nan, nan.clone())
    assert not stops._same_bytes(nan, torch.tensor([[float("nan"), 2.0]]))
    assert stops._same_bytes(torch.tensor(3), torch.tensor(3))
