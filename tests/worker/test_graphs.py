"""Which graph a step gets, by a manager of graphs that is made up here: there is no device."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nnsight_async import UnsupportedError
from nnsight_async.worker import graphs
from nnsight_async.worker.graphs import Graphs
from nnsight_async.worker.v1 import V1Entry


class Mode(Enum):
    NONE = 0
    FULL = 2


@dataclass(frozen=True)
class Shape:
    num_tokens: int
    num_reqs: int
    cg_mode: Mode = Mode.FULL
    uniform_token_count: int | None = 1
    max_query_len: int | None = None
    num_active_loras: int = 0


EIGHT = Shape(8, 8, num_active_loras=2)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    monkeypatch.setattr(graphs, "use_kernels", lambda model, config: None)
    manager = SimpleNamespace(dispatch=lambda requests, tokens, **more: EIGHT)
    found = Graphs(SimpleNamespace(cudagraph_manager=manager, model=torch.nn.Identity(), vllm_config=None))
    found.interleaver = SimpleNamespace(looks=False)  # type: ignore[assignment]
    return found


def test_a_step_into_which_nobody_looks_is_vllms(chosen: Graphs) -> None:
    chosen.choose()
    assert chosen._manager.dispatch(5, 5) is EIGHT


def test_a_step_into_which_somebody_looks_calls_modules_without_padding(chosen: Graphs) -> None:
    chosen.interleaver.looks = True  # type: ignore[misc]
    chosen.choose()
    assert chosen._manager.dispatch(5, 5) == Shape(5, 5, Mode.NONE, None, None, 2)

    chosen.interleaver.looks = False  # type: ignore[misc]
    chosen.choose()
    assert chosen._manager.dispatch(5, 5) is EIGHT


def test_it_replays_a_graph_that_stops_where_one_was_recorded(chosen: Graphs) -> None:
    chosen._stopping[EIGHT] = object()
    chosen.interleaver.looks = True  # type: ignore[misc]
    chosen.choose()
    assert chosen._manager.dispatch(5, 5) is EIGHT


def test_where_nothing_is_done_but_reading_it_replays_a_graph_that_copies(chosen: Graphs) -> None:
    done: list[object] = []

    def graph(name: str) -> Any:
        return SimpleNamespace(replay=lambda: done.append(name))

    interleaver: Any = SimpleNamespace(
        looks=True, only_reads=True, calls=False, waiting=["a tap"], order=SimpleNamespace(late=lambda event: False)
    )
    interleaver.share = lambda: None
    chosen.interleaver = interleaver
    chosen._stopping[EIGHT], chosen._copying[EIGHT] = graph("stops"), graph("copies")
    served = ["a tap"]
    chosen._copies = SimpleNamespace(serves=lambda events: events == served, pass_on=done.append)  # type: ignore[assignment]

    chosen.choose()
    chosen.replay(EIGHT, graph("plain"))
    assert done == ["copies", 8]

    served.clear()
    chosen.replay(EIGHT, graph("plain"))
    assert done == ["copies", 8, "stops"]

    interleaver.only_reads, served[:] = False, ["a tap"]
    chosen.replay(EIGHT, graph("plain"))
    assert done == ["copies", 8, "stops", "stops"]


def test_graphs_of_the_v1_runner_are_refused() -> None:
    def runner(eager: bool) -> Any:
        return SimpleNamespace(vllm_config=SimpleNamespace(model_config=SimpleNamespace(enforce_eager=eager)))

    assert V1Entry.graphs(runner(True)) is None
    with pytest.raises(UnsupportedError, match="enforce_eager=True"):
        V1Entry.graphs(runner(False))
