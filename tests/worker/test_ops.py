"""Declared operations in the worker: how much there is room for, what a step copies, and the kernel on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight_async import OpLimitError
from nnsight_async.runs.ops import Op, ShippedOps, Vector
from nnsight_async.runs.shipment import Shipment
from nnsight_async.testing import v2_runner_environment
from nnsight_async.worker.blocks import Edit
from nnsight_async.worker.composition import NOBODY, Composition
from nnsight_async.worker.op_kernel import change
from nnsight_async.worker.op_sites import OpSites
from nnsight_async.worker.op_tables import Sizes, Tables
from nnsight_async.worker.ops import Limits, Ops
from tests.worker.simulation import Served, Simulation

ROOT = Path(__file__).parents[2]
SITES = {"layers.0": 0, "layers.1": 1}
WIDTH = 8


class Params:
    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens


class Request:
    def __init__(self, name: str, max_tokens: int = 8) -> None:
        self.req_id = name
        self.sampling_params = Params(max_tokens)


class Worker:
    """Operations of requests of four tokens each on two layers, with room for little."""

    def __init__(self, states: int = 8, nodes: int = 16, vectors: int = 4) -> None:
        self.tables = Tables(Sizes(64, len(SITES), states, nodes, vectors, WIDTH), torch.device("cpu"))
        self.ops = Ops(SITES, lambda: self.tables, Limits(64))

    def arrive(self, name: str, *ops: Op) -> Exception | None:
        shipped: Any = ShippedOps.of(ops)
        request: Any = Request(name)
        return self.ops.arrive(request, shipped, 4, edits={7})

    def step(self, computed: int, *requests: str, rows: int = 1) -> list[list[float]]:
        """What a pass over so many rows of each of the requests makes of ones after the first layer, by request."""
        starts = [rows * number for number in range(len(requests) + 1)]
        self.ops.begin_step(Composition(requests, starts, [computed] * len(requests), starts[-1]))
        hidden = torch.ones(starts[-1] + 3, WIDTH)
        change(self.tables, self.tables.heads[0], hidden, None)
        assert torch.equal(hidden[starts[-1] :], torch.ones(3, WIDTH))  # the padding
        return hidden[:, 0].unflatten(0, (-1, rows))[: len(requests)].tolist() if rows == 1 else hidden[:, 0].tolist()


def steer(value: float, path: str = "layers.0", scale: float = 1.0, positions: Any = None) -> Op:
    return Op("steer", path, Vector.of(torch.full((WIDTH,), value)), scale, 0.0, positions)


def test_each_row_has_the_operations_of_its_request() -> None:
    worker = Worker()
    worker.arrive("a", steer(1.0), steer(10.0, scale=2.0))
    worker.arrive("b", steer(5.0, path="layers.1"))
    worker.arrive("c", steer(1.0))
    assert worker.step(4, "c", "plain", "a", "b") == [[2.0], [1.0], [22.0], [1.0]]
    assert worker.step(5, "a", "c") == [[22.0], [2.0]]
    worker.ops.part(["a"])
    assert worker.step(6, "c", "new") == [[2.0], [1.0]]


def test_no_row_keeps_what_a_request_that_is_over_had() -> None:
    worker = Worker()
    worker.arrive("a", steer(1.0))
    worker.step(4, "plain", "a")
    worker.ops.part(["a"])
    assert worker.ops.idle
    worker.ops.begin_step(NOBODY)
    assert worker.step(5, "plain", "other") == [[1.0], [1.0]]


def test_a_step_like_the_one_before_copies_nothing() -> None:
    worker = Worker()
    worker.arrive("a", steer(1.0))
    worker.arrive("b", steer(2.0, positions="generated"))
    worker.step(0, "a", "b", rows=4)
    worker.step(4, "a", "b")
    copied = [table._version for table in (worker.tables.slots, worker.tables.nodes, worker.tables.vectors)]
    assert worker.step(5, "a", "b") == worker.step(6, "a", "b") == [[2.0], [3.0]]
    assert [table._version for table in (worker.tables.slots, worker.tables.nodes, worker.tables.vectors)] == copied
    assert worker.step(7, "b", "a") == [[3.0], [2.0]]


def test_positions_are_those_of_the_request_though_it_is_computed_again() -> None:
    worker = Worker()
    worker.arrive("a", steer(1.0, positions=(1, -1, 5)))
    first = [1.0, 2.0, 1.0, 2.0]
    assert worker.step(0, "a", rows=4)[:4] == first
    assert [worker.step(position, "a") for position in (4, 5, 6)] == [[[1.0]], [[2.0]], [[1.0]]]
    assert worker.step(0, "a", rows=6)[:6] == [*first, 1.0, 2.0]
    assert [worker.step(position, "a") for position in (6, 7, 1, 2)] == [[[1.0]], [[1.0]], [[2.0]], [[1.0]]]


def test_requests_share_vectors_and_past_the_room_for_them_one_fails_alone() -> None:
    worker = Worker(vectors=4)
    for name in ("a", "b", "c", "d", "e", "f", "g", "h", "i"):
        assert worker.arrive(name, steer(1.0)) is None  # one vector, in one combination
    assert worker.arrive("j", steer(2.0), steer(3.0)) is None
    assert worker.arrive("k", steer(4.0)) is None
    failed = worker.arrive("l", steer(5.0))
    assert isinstance(failed, OpLimitError)
    assert "4 vectors" in str(failed)
    assert worker.step(4, "i", "j", "k", "l") == [[2.0], [6.0], [5.0], [1.0]]

    worker.ops.part(["j"])
    assert worker.arrive("l", steer(5.0), steer(6.0)) is None
    assert worker.step(4, "i", "k", "l") == [[2.0], [5.0], [12.0]]


def test_one_request_has_half_of_the_room() -> None:
    worker = Worker(vectors=4)
    failed = worker.arrive("a", steer(1.0), steer(2.0), steer(3.0))
    assert isinstance(failed, OpLimitError)
    assert "take 3 vectors; one request may have 2" in str(failed)
    assert worker.ops.idle


def test_what_was_found_for_a_request_that_has_no_room_is_given_back() -> None:
    worker = Worker(nodes=16)
    assert worker.arrive("most", *[steer(1.0)] * 8) is None
    assert worker.arrive("one", steer(1.0)) is None
    many = [steer(1.0, positions=(0,)), steer(1.0, scale=2.0, positions=(1,)), steer(1.0, scale=3.0), steer(1.0)]
    for name in ("a", "b", "c", "d"):  # each needs eight steps, in three combinations
        assert isinstance(worker.arrive(name, *many), OpLimitError)
    assert worker.arrive("e", *[steer(2.0)] * 7) is None
    assert worker.step(4, "most", "one", "e") == [[9.0], [2.0], [15.0]]


def test_edits_that_end_leave_the_operations_of_requests_that_go_on() -> None:
    worker = Worker()
    edited = replace(steer(1.0), edit=7)
    worker.arrive("a", edited, steer(2.0))
    worker.arrive("b", edited)
    worker.arrive("cleared before it came", replace(steer(1.0), edit=6), steer(2.0))
    names = ("a", "b", "cleared before it came")
    assert worker.step(4, *names) == [[4.0], [2.0], [3.0]]
    worker.ops.clear([7])
    assert worker.step(5, *names) == [[3.0], [1.0], [3.0]]
    assert "b" in worker.ops  # and is not taken in again, where it is preempted
    worker.ops.part(["b"])
    assert "b" not in worker.ops


def test_what_an_operation_may_have_made_infinite_stays_so_when_its_edit_ends() -> None:
    worker = Worker()
    worker.arrive("a", replace(steer(1.0, scale=1e30), edit=7))
    worker.arrive("b", replace(steer(1.0, scale=1e30, positions="prompt"), edit=7), steer(2.0))
    worker.step(4, "plain", "a", "b")
    assert worker.ops.wild == [1, 2]
    worker.ops.clear([7])
    assert worker.step(5, "plain", "b", "a") == [[1.0], [3.0], [1.0]]
    assert worker.ops.wild == [1, 2]
    assert worker.ops.wild_requests == {
        "a",
        "b",
    }  # and what they are given of the cache is cleared before others have it
    worker.ops.part(["b"])
    assert not worker.ops.idle
    worker.step(6, "a", "plain")
    assert worker.ops.wild == [0]
    worker.ops.part(["a"])
    assert worker.ops.idle
    worker.step(7, "plain")
    assert worker.ops.wild == []


def test_an_edit_ends_for_all_though_there_is_no_room_for_what_one_of_them_goes_on_with() -> None:
    worker = Worker(states=4)
    edited = replace(steer(1.0), edit=7)
    worker.arrive("a", edited, steer(2.0))
    worker.arrive("shares", steer(1.0), steer(2.0))  # the same, of its own
    worker.arrive("b", edited)
    for name, value in (("c", 3.0), ("d", 4.0)):
        assert worker.arrive(name, steer(value)) is None
    assert worker.arrive("shares too", steer(1.0)) is None
    ((failed, error),) = worker.ops.clear([7])
    assert failed == "a"
    assert isinstance(error, OpLimitError)
    names = ("a", "b", "c", "d", "shares", "shares too")
    assert worker.step(5, *names) == [[1.0], [1.0], [4.0], [5.0], [4.0], [2.0]]
    assert worker.ops.clear([7]) == []


def test_who_arrives_is_given_the_room_of_those_that_are_over() -> None:
    """As many vectors as there is room for, in every step."""
    simulation = Simulation()
    worker = Worker(states=8, vectors=4)
    simulation.blocks.ops = worker.ops
    before: list[Served] = []
    for number in range(3):
        ops = ([steer(4.0 * number + 1), steer(4.0 * number + 2)], [steer(4.0 * number + 3), steer(4.0 * number + 4)])
        served = [operated(simulation, own) for own in ops]
        for each in before:
            simulation.finish(each)
        simulation.step(served)
        simulation.deliver(simulation.letters.take())
        assert [each.run.error for each in served] == [None, None]
        before = served


def test_a_request_that_there_is_no_room_for_when_an_edit_ends_fails_alone() -> None:
    simulation = Simulation()
    simulation.blocks.ops = Worker(states=2).ops
    simulation.blocks._edits[7] = Edit(b"", rowwise=True)
    one = operated(simulation, [replace(steer(1.0), edit=7), steer(2.0)])
    other = operated(simulation, [steer(1.0), steer(2.0)])
    third = operated(simulation, [steer(5.0)])
    drawn = simulation.step([one, other, third])
    simulation.deliver(simulation.letters.take())
    for each in (one, other, third):
        simulation.tell(each, drawn[each.name])
    simulation.blocks.clear([7])
    simulation.deliver(simulation.letters.take())
    assert isinstance(one.run.error, OpLimitError)
    assert (other.run.error, third.run.error) == (None, None)


def operated(simulation: Simulation, ops: list[Op]) -> Served:
    served = simulation.add([9, 10, 11, 12], None, 8)
    served.params.max_tokens = 8
    served.run.ride([], operated=True)
    Shipment((served.run.key,), None, 1 << 30, 5.0, (), ops=ShippedOps.of(ops)).onto(served.params)
    return served


COMPARE = """
import torch
from nnsight_async.worker.op_kernel import in_torch
from nnsight_async.worker.op_tables import NOTHING, Mirror, Sizes, Tables
from nnsight_async.worker.op_triton import in_triton

torch.manual_seed(0)
# Triton's interpreter cuts off where it makes bfloat16 of float32.
close = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
for width in (96, 128):
    tables = Tables(Sizes(16, 2, 4, 8, 4, width), torch.device("cpu"))
    mirror = Mirror(tables)
    vectors = torch.nn.functional.normalize(torch.randn(4, width), dim=1)
    for number, vector in enumerate(vectors):
        mirror.vector(number, vector)
    nodes = ((0, 0, 1, 1.5, 0.0), (1, 1, 2, 0.5, 0.0), (2, 2, NOTHING, -0.1, 0.2), (3, 3, 4, 0.0, 0.0),
             (0, 1, NOTHING, -2.0, 0.0), (2, 0, NOTHING, float("-inf"), 0.0))
    for number, node in enumerate(nodes):
        mirror.node(number, *node)
    mirror.state(0, {1: 0})
    mirror.state(1, {0: 5, 1: 3})
    mirror.state(2, {0: 5})
    mirror.upload()
    mirror.mark([0, NOTHING, 1, 2, 1, 0, 0])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for pair in (False, True):
            hidden, residual = torch.randn(20, width).to(dtype), torch.randn(20, width).to(dtype)
            found = []
            for apply in (in_torch, in_triton):
                own = hidden.clone(), residual.clone() if pair else None
                apply(tables, tables.heads[1], *own)
                found.append(own)
            rows = [0, 2, 4, 5, 6]
            rest = [row for row in range(20) if row not in rows]
            for (changed, same), before in zip(zip(*found), (hidden, residual)):
                if changed is None:
                    continue
                assert torch.equal(same[rest], before[rest])
                assert not torch.equal(same[rows], before[rows])
                torch.testing.assert_close(same, changed, rtol=close[dtype], atol=4 * close[dtype])
print("compared")
"""


def test_the_kernel_of_triton_does_what_torch_does() -> None:
    environment = {**os.environ, **v2_runner_environment()}
    search = os.pathsep.join([environment["PYTHONPATH"], str(ROOT)])
    ended = subprocess.run(
        [sys.executable, "-c", COMPARE],
        env={**environment, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.stdout.strip() == "compared", ended.stderr[-4000:]


class Layer(torch.nn.Module):
    """Returns (hidden, residual), or their sum, as decoder layers do."""

    def __init__(self, pair: bool) -> None:
        super().__init__()
        self.pair = pair
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        residual = hidden if residual is None else hidden + residual
        hidden = self.linear(residual)
        return (hidden, residual) if self.pair else hidden + residual


class Model(torch.nn.Module):
    def __init__(self, pair: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(pair) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        residual = None
        for layer in self.layers:
            output = layer(hidden, residual)
            hidden, residual = output if isinstance(output, tuple) else (output, None)
        return hidden if residual is None else hidden + residual


@pytest.mark.parametrize("double", [True, False])
def test_what_is_compiled_with_the_layers_goes_by_the_tables_of_the_step(double: bool) -> None:
    torch.manual_seed(0)
    model, rows = Model(double), torch.randn(5, WIDTH)
    with torch.inference_mode():
        plain = model(rows)
        sites = OpSites(list(SITES), Sizes(64, 2, 4, 8, 4, WIDTH), torch.device("cpu"))
        sites.hook(model)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(rows), plain)

        ops = Ops(sites.numbers, sites.made, Limits(64))
        for name, value, path in (("a", 1.0, "layers.1"), ("b", 2.0, "layers.1"), ("c", 3.0, "layers.0")):
            shipped: Any = ShippedOps.of([steer(value, path)])
            request: Any = Request(name)
            assert ops.arrive(request, shipped, 4) is None
        ops.begin_step(Composition(["b", "none", "a"], [0, 2, 3, 4], [4, 4, 4], 4))

        added = torch.tensor([2.0, 2.0, 0.0, 1.0, 0.0])[:, None]
        torch.testing.assert_close(compiled(rows), plain + added)
        torch.testing.assert_close(model(rows), plain + added)
        ops.begin_step(Composition(["c"], [0, 5], [4], 5))
        shifted = model.layers[1](model.layers[0].linear(rows) + rows + 3.0, None)
        torch.testing.assert_close(compiled(rows), sum(shifted) if double else shifted)
