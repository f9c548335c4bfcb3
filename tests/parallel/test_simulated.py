"""Random programs in drawn steps on two ranks: what they see and do is what they see and do on one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, note, settings

from tests.parallel.simulation import Together
from tests.programs.drawn import Task, batches
from tests.worker.simulation import Served, Simulation
from tests.worker.test_programs_simulated import EXAMPLES, MOVES, Move, assert_same, run, seen

FEW = settings(EXAMPLES, max_examples=max(EXAMPLES.max_examples // 3, 1))


@pytest.fixture(scope="module")
def one() -> Simulation:
    return Simulation()


@pytest.fixture(scope="module")
def two() -> Iterator[Together]:
    simulation = Together(2)
    yield simulation
    simulation.close()


@pytest.fixture(scope="module")
def four() -> Iterator[Together]:
    """As many ranks as there are heads, and twice as many as there are heads of keys."""
    simulation = Together(4)
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
def test_programs_where_ranks_have_the_same_keys(one, four, batch, moves):
    hold(one, four, batch, moves)


def hold(one: Simulation, two: Together, batch: tuple[Task, ...], moves: list[Move]) -> None:
    note("\n".join(f"request {number}: {task}" for number, task in enumerate(batch)))
    on_one, on_two = run(one, batch, moves), run(two, batch, moves)
    for task, alone, together in zip(batch, on_one, on_two, strict=True):
        assert_same(seen(task, together), seen(task, alone))
    assert_nothing_left(two)
    one.requests.clear()
    two.requests.clear()


def assert_nothing_left(two: Together) -> None:
    for blocks in two.every_blocks:
        interleaver = blocks.interleaver
        held = [blocks.runs, interleaver.waiting, interleaver.sites.entered, interleaver.sites.inside.watched]
        assert not any(held)
    for other in two.others:
        assert not other.blocks.interleaver._runs
        assert not other.blocks.interleaver._remembered
    assert not two.blocks.interleaver._told


def test_every_module_of_the_model_is_known(two):
    layouts = two.layouts
    assert all(layouts.known(event) for event in layouts)
    split = {(event.path.removeprefix("model.layers.0."), event.kind) for event in layouts if "layers.0." in event.path}
    assert split == {
        ("self_attn.qkv_proj", "output"),
        ("self_attn.rotary_emb", "inputs"),
        ("self_attn.rotary_emb", "output"),
        ("self_attn.attn", "inputs"),
        ("self_attn.attn", "output"),
        ("self_attn.o_proj", "inputs"),
        ("mlp.up", "output"),
        ("mlp.down", "inputs"),
    }


def served(simulation: Simulation, probe: Any, *, steps: int = 3, seed: int = 0) -> Served:
    torch.manual_seed(seed)
    request = simulation.add([9, 8, 7], probe, steps)
    while not (request.over or request.run.settled):
        drawn = simulation.step([request])
        simulation.deliver(simulation.letters.take())
        simulation.tell(request, drawn[request.name])
    simulation.finish(request)
    simulation.step([])
    simulation.deliver(simulation.letters.take())
    return request


def test_heads_and_those_that_they_look_at(one, two, four):
    def probe(model, tracer):
        for step in tracer.iter[:]:
            heads = model.model.layers[1].self_attn.heads
            for number in range(4):
                tracer.save((heads[number].q, heads[number].k, heads[number].v), f"head {number} in step {step}")
            heads[3].k += 1.0
            heads[0].v = 2.0 * heads[0].v
            tracer.save((heads[2].k, heads[1].v, heads[-1].k), f"written in step {step}")
            tracer.save(model.logits, f"logits {step}")

    alone = served(one, probe)
    assert torch.equal(alone.run.values["head 2 in step 0"][1], alone.run.values["head 3 in step 0"][1])
    assert not torch.equal(alone.run.values["head 1 in step 0"][1], alone.run.values["head 2 in step 0"][1])
    for simulation in (two, four):
        assert_same(served(simulation, probe).run.values, alone.run.values)


def test_an_edit_that_is_cleared_in_the_midst_of_a_request_ends_on_all_ranks(two):
    def doubles(model, tracer):
        for _ in tracer.iter[:]:
            model.model.layers[1].mlp.up.output[:] *= 2.0

    request = two.add([9, 8, 7], None, 4, edit=doubles)
    for step in range(3):
        drawn = two.step([request])
        two.deliver(two.letters.take())
        two.tell(request, drawn[request.name])
        if step == 0:
            exchanges = two.clear([edit.number for edit in request.run.edits])
    assert two.blocks.interleaver.exchanges == exchanges
    two.finish(request)
    two.step([])
    assert_nothing_left(two)


def test_steps_without_blocks_say_nothing(two):
    before = two.blocks.interleaver.exchanges
    served(two, None)
    assert two.blocks.interleaver.exchanges == before


def test_a_block_that_has_ended_costs_no_more(two):
    def early(model, tracer):
        model.model.layers[0].output[0].save()

    def said(steps: int) -> int:
        before = two.blocks.interleaver.exchanges
        served(two, early, steps=steps)
        return two.blocks.interleaver.exchanges - before

    assert said(8) == said(2)


def test_an_error_in_the_midst_of_a_step_ends_that_block_on_all_ranks(two):
    def breaks(model, tracer):
        for step in tracer.iter[:]:
            model.model.layers[1].self_attn.qkv_proj.output
            assert step < 1, "in step 1"

    request = served(two, breaks)
    assert isinstance(request.run.error, AssertionError)
    assert_nothing_left(two)


def test_what_a_block_draws_leaves_the_numbers_of_the_model_alone(two):
    def draws(model, tracer):
        noises = tracer.save([], "noises")
        for _ in tracer.iter[:]:
            model.model.layers[1].output
            noises.append(torch.rand(4))

    noises = served(two, draws, seed=7).run.values["noises"]
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(7).get_state())
    assert len({tuple(noise.tolist()) for noise in noises}) == 3
