"""Runs that do the same in every step are kept as one; what comes of it is what comes of each alone."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nnsight_async.errors import NotComputedError, SaveBudgetError
from nnsight_async.interleave import crews
from nnsight_async.interleave.bundle import Bundle, Odd
from nnsight_async.interleave.plan import Read, Save
from nnsight_async.interleave.together import Places
from tests.programs.drawn import Task
from tests.worker.causal import WIDTH
from tests.worker.simulation import Served, Simulation
from tests.worker.test_plans_simulated import Text, done, line_of
from tests.worker.test_programs_simulated import MOVES, Schedule, assert_same, seen

READS = (
    "x = model.model.layers[1].mlp.output.save()",
    "acts.append(model.model.layers[2].mlp.output[-1, 2:6])",
    "y = model.model.layers[2].resid_post[-1].save()",
    'tracer.save(model.model.layers[2].output, "both")',
    "logits = model.logits.save()",
    "drawn.append(model.samples)",
)
LOOPS = ("tracer.iter[:]", "tracer.all()", "tracer.iter[1:6]", "tracer.iter[2:]", "tracer.iter[::2]", "tracer.iter[3]")


def text(reads: list[int], loop: str = "tracer.iter[:]", before: tuple[str, ...] = ()) -> Text:
    lines = ("acts = [].save()", "drawn = [].save()", *before, f"for step in {loop}:")
    return Text((*lines, *(f"    {READS[read]}" for read in sorted(reads))), 1)


ONE = text([0, 1, 4])


def assert_equal(batch: list[tuple[Task, Text | None]], some: list[Served], others: list[Served]) -> None:
    for (task, _), one, other in zip(batch, some, others, strict=True):
        assert_same(seen(task, one), seen(task, other))
        assert one.run.ledger.bytes == other.run.ledger.bytes
        assert line_of(one.run.error) == line_of(other.run.error)
        tensors = [value for value in one.run.values.values() if isinstance(value, torch.Tensor)]
        assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)


def tasks(*tokens: int) -> list[Task]:
    return [Task(tuple(range(9 + number, 11 + 2 * number)), count) for number, count in enumerate(tokens)]


EXAMPLES = settings(
    max_examples=int(os.environ.get("CREWS", "12")),
    deadline=None,
    derandomize="CREWS" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@st.composite
def batches(draw: Any) -> list[tuple[Task, Text | None]]:
    reads = st.lists(st.integers(0, len(READS) - 1), min_size=1, max_size=4, unique=True)
    before = st.sampled_from([(), (), ("h = model.model.layers[1].mlp.output", "h[:] += own")])
    known = draw(st.lists(st.builds(text, reads, st.sampled_from(LOOPS), before), min_size=1, max_size=2))
    some = st.builds(
        Task,
        prompt=st.lists(st.integers(8, 511), min_size=1, max_size=3).map(tuple),
        max_tokens=st.integers(3, 14),
        joins=st.none(),
    )
    return draw(st.lists(st.tuples(some, st.sampled_from([*known, *known, None])), min_size=1, max_size=6))


@EXAMPLES
@given(batch=batches(), moves=MOVES)
def test_drawn_requests(simulation, batch, moves):
    together = done(simulation, batch, moves, plans=True)
    assert_equal(batch, together, done(simulation, batch, moves, plans=False))


def test_steps_are_reported_together(simulation):
    batch = [(task, ONE) for task in tasks(9, 9, 5)]
    before = simulation.letters.together
    found = done(simulation, batch, [], plans=True)
    assert simulation.letters.together - before == 7 + 7 + 3  # all but the prompt, and the first with which they begin
    assert_equal(batch, found, done(simulation, batch, [], plans=False))
    for each in found:
        assert torch.stack(each.run.values["acts"]).shape == (len(each.ids), 4)
        assert [token.saves["logits"].argmax().item() for token in each.run.tokens] == each.ids


def test_a_loop_ends_while_others_go_on(simulation):
    batch = [(task, text([0, 1], loop)) for task, loop in zip(tasks(12, 12, 12), LOOPS[::2], strict=True)]
    before = simulation.letters.together
    found = done(simulation, batch, [], plans=True)
    assert simulation.letters.together - before == (12 - 2) + (6 - 3)  # in its last step, a block has ended
    assert_equal(batch, found, done(simulation, batch, [], plans=False))


@pytest.mark.parametrize("plans", [True, False])
def test_values_are_final_with_the_last_step_of_a_loop(simulation, plans):
    simulation.blocks.interleaver.plans = plans  # type: ignore[misc]
    (task,) = tasks(9)
    served = simulation.add(task.prompt, text([0], "tracer.iter[1:6]").probe(0), task.max_tokens)
    final: list[bool] = []
    for _ in range(8):
        drawn = simulation.step([served])
        simulation.deliver(simulation.letters.take())
        simulation.tell(served, drawn[served.name])
        final.append(served.run.values_final)
    assert final == [False] * 5 + [True] * 3
    simulation.finish(served)
    simulation.step([])
    simulation.deliver(simulation.letters.take())
    simulation.requests.clear()


@pytest.mark.parametrize("at", range(8))
def test_what_cannot_be_done_together_is_done_by_each_in_the_middle_of_a_step(simulation, monkeypatch, at):
    """Four stages a step: those that come before, or after, are not done twice."""
    calls = 0

    class Failing(Bundle):
        def do(self, deeds: Any, operand: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 4 + at:
                raise Odd
            super().do(deeds, operand)

    monkeypatch.setattr(crews, "Bundle", Failing)
    batch = [(task, text([0, 1, 2, 4])) for task in tasks(8, 8, 6)]
    found = done(simulation, batch, [], plans=True)
    assert calls > 4 + at
    assert_equal(batch, found, done(simulation, batch, [], plans=False))


def test_what_does_not_come_in_a_step_is_an_error_of_each():
    simulation = Simulation()
    layer = simulation.model.model.layers[1]
    own, mlp = layer.forward, layer.mlp
    batch = [(task, text([0, 2])) for task in tasks(9, 9)]
    results: list[list[Served]] = []
    passes = 0

    def forward(*args: Any) -> Any:
        nonlocal passes
        passes += 1
        layer.mlp = torch.nn.Identity() if passes == 7 else mlp
        return own(*args)

    layer.forward = forward
    for plans in (True, False):
        passes = 0
        results.append(done(simulation, batch, [], plans=plans))
    assert_equal(batch, *results)
    for each in results[0]:
        assert isinstance(each.run.error, NotComputedError)
        assert len(each.run.tokens) == 6


@pytest.mark.parametrize("key", [torch.zeros(2, 3), (torch.zeros(2, 3),), (1, 2)])
def test_keys_that_may_be_of_one_run_alone_are_not_read_together(key):
    rows = torch.arange(6.0).view(2, 3)
    save = Save(Read(0, None, "h", 1), (), "x", False, 1)
    bundle = Bundle({"a": rows, 3: rows}, 2, Places([0, 1]))
    bundle.do([save], lambda index: pytest.fail("none is asked for"))
    ((_, whole),) = bundle.saved
    assert whole["a"].tolist() == [[[0.0, 1.0, 2.0]], [[3.0, 4.0, 5.0]]]
    with pytest.raises(Odd):
        Bundle({key: rows}, 2, Places([0, 1])).do([save], lambda index: pytest.fail("none is asked for"))


def test_a_budget_ends_a_run_in_the_step_that_is_past_it(simulation, monkeypatch):
    batch = [(task, text([0])) for task in tasks(12, 12)]
    arrive = simulation.blocks._arrive

    def arrived(request: Any, failure: Any) -> bool:
        found = arrive(request, failure)
        (run,) = simulation.blocks._runs[request.req_id]
        if run.prompt_rows == 2:
            run.saves.budget = 8 * WIDTH * (2 + 6) + 100
        return found

    monkeypatch.setattr(simulation.blocks, "_arrive", arrived)
    results = [done(simulation, batch, [], plans=plans) for plans in (True, False)]
    assert_equal(batch, *results)
    first, second = results[0]
    assert isinstance(first.run.error, SaveBudgetError)
    assert len(first.run.tokens) == 7
    assert second.run.error is None


def test_what_is_asked_of_a_run_meanwhile_is_as_of_now(simulation):
    simulation.blocks.interleaver.plans = True  # type: ignore[misc]
    (task,) = tasks(9)
    served = simulation.add(task.prompt, ONE.probe(0), task.max_tokens)
    for step in range(6):
        drawn = simulation.step([served])
        simulation.deliver(simulation.letters.take())
        simulation.tell(served, drawn[served.name])
        if step in (3, 5):
            (run,) = simulation.blocks.stand_alone()
            assert (run.step, run.reports, run.position) == (step, step + 1, len(task.prompt) + step)
            assert run.saves.spent == served.run.ledger.bytes
            assert run.crew is None
    simulation.finish(served)
    simulation.step([])
    simulation.deliver(simulation.letters.take())
    assert served.run.ledger.done
    simulation.requests.clear()


def test_a_block_beside_an_edit_sees_in_every_step_what_that_has_written(simulation):
    there = "model.model.layers[1].mlp.output"
    edit = Text(("for step in tracer.iter[:]:", f"    {there}[:] += own", f"    edited = {there}.save()"), 1)
    saving = Text(("for step in tracer.iter[:]:", f"    edited = {there}.save()"), 1)
    block = Text(("for step in tracer.iter[:]:", f"    seen = {there}.save()"), 1)
    for each in (edit, saving):
        results: list[list[Served]] = []
        for plans in (True, False):
            simulation.blocks.interleaver.plans = plans  # type: ignore[misc]
            served = [
                simulation.add(task.prompt, block.probe(0), task.max_tokens, edit=each.probe(0)) for task in tasks(7, 7)
            ]
            Schedule(simulation, list(zip(tasks(7, 7), served, strict=True))).run([])
            simulation.requests.clear()
            results.append(served)
        assert_equal([(task, None) for task in tasks(7, 7)], *results)
        for found in results[0]:
            assert found.run.error is None
            for token in found.run.tokens:
                torch.testing.assert_close(token.saves["seen"], token.saves["edited"])


def test_a_row_that_is_computed_again_is_not_taken_for_the_next(simulation):
    simulation.blocks.interleaver.plans = True  # type: ignore[misc]
    (task,) = tasks(9)
    served = simulation.add(task.prompt, ONE.probe(0), task.max_tokens)
    for _ in range(4):
        drawn = simulation.step([served])
        simulation.tell(served, drawn[served.name])
    (run,) = simulation.blocks._runs[served.name]
    crew, position = run.crew, len(task.prompt) + 4
    assert crew.position(run) == position - 1
    assert not crew.takes(run, 0, 0, 1, position - 2)
    assert run.crew is None
    assert run.position == position - 1
    simulation.finish(served)
    simulation.step([])
    simulation.letters.take()
    simulation.requests.clear()
