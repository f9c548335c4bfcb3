"""Random programs in drawn steps on the stages of a pipeline: what they see and do is what they see and do on one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, note, settings

from tests.parallel.pipeline import Pipeline
from tests.programs.drawn import Task, batches
from tests.worker.simulation import Simulation
from tests.worker.test_programs_simulated import EXAMPLES, MOVES, Move, assert_same, run, seen

FEW = settings(EXAMPLES, max_examples=max(EXAMPLES.max_examples // 3, 1))


@pytest.fixture(scope="module")
def one() -> Simulation:
    return Simulation()


@pytest.fixture(scope="module")
def two() -> Iterator[Pipeline]:
    simulation = Pipeline(2)
    yield simulation
    simulation.close()


@pytest.fixture(scope="module")
def three() -> Iterator[Pipeline]:
    """The stage in the middle hears of one before it and of one behind it."""
    simulation = Pipeline(3)
    yield simulation
    simulation.close()


@FEW
@given(batch=batches(requests=(1, 6), rows=(1, 10), tokens=(1, 8)), moves=MOVES)
def test_programs(one, two, batch, moves):
    hold(one, two, batch, moves)


@FEW
@given(batch=batches(requests=(1, 6), rows=(1, 10), tokens=(1, 8), edits=True), moves=MOVES)
def test_programs_and_edits(one, two, batch, moves):
    hold(one, two, batch, moves)


@FEW
@given(batch=batches(requests=(1, 4), rows=(1, 10), tokens=(1, 6)), moves=MOVES)
def test_programs_on_three_stages(one, three, batch, moves):
    hold(one, three, batch, moves)


def hold(one: Simulation, many: Pipeline, batch: tuple[Task, ...], moves: list[Move]) -> None:
    note("\n".join(f"request {number}: {task}" for number, task in enumerate(batch)))
    on_one, on_many = run(one, batch, moves), run(many, batch, moves)
    for task, alone, together in zip(batch, on_one, on_many, strict=True):
        assert_same(seen(task, together), seen(task, alone))
    assert_nothing_left(many)
    one.requests.clear()
    many.requests.clear()


def assert_nothing_left(many: Pipeline) -> None:
    many.step([])  # the stages hear of the last steps
    for blocks in many.every_blocks:
        interleaver = blocks.interleaver
        held = [blocks.runs, interleaver.waiting, interleaver.sites.entered, interleaver.sites.inside.watched]
        assert not any(held)
        assert not any(vars(interleaver)[name] for name in ("closed", "_noted", "_coming", "_met", "_open"))
