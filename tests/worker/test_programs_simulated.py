"""Random programs in batches whose every step is drawn too: who is in it, in which order, and who was preempted."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from nnsight_async import RunCancelledError
from tests.programs.drawn import Task, batches
from tests.programs.program import Planned, block_of
from tests.worker.simulation import Served, Simulation


@dataclass(frozen=True)
class Move:
    """One step: who rests, who is preempted before it, where the order begins, and whether messages come late."""

    rests: frozenset[int] = frozenset()
    preempted: frozenset[int] = frozenset()
    turn: int = 0
    late: bool = False


AS_IT_COMES = Move()
SOME = st.frozensets(st.integers(0, 5), max_size=3)
MOVES = st.lists(st.builds(Move, SOME, SOME, st.integers(0, 5), st.booleans()), min_size=12, max_size=20)


@dataclass
class Schedule:
    """Takes a batch to its end by the moves, and then as it comes."""

    simulation: Simulation
    tasks: list[tuple[Task, Served]]
    late: list[Any] = field(default_factory=list)

    def run(self, moves: list[Move]) -> None:
        while live := [pair for pair in self.tasks if not self._left(*pair)]:
            move = moves.pop(0) if moves else AS_IT_COMES
            joined = [(task, served) for task, served in live if self._joined(task)]
            for number in move.preempted:
                self.simulation.preempt(joined[number % len(joined)][1])
            present = [pair for number, pair in enumerate(joined) if number not in move.rests]
            turn = move.turn % max(len(present), 1)
            self._step(present[turn:] + present[:turn], late=move.late)
        self.simulation.step([])
        self.simulation.deliver([*self.late, *self.simulation.letters.take()])

    def _joined(self, task: Task) -> bool:
        if task.joins is None:
            return True
        _, other = self.tasks[task.joins[0]]
        return len(other.ids) >= task.joins[1] or self._left(self.tasks[task.joins[0]][0], other)

    def _left(self, task: Task, served: Served) -> bool:
        return served.over or served.run.settled

    def _step(self, present: list[tuple[Task, Served]], *, late: bool) -> None:
        drawn = self.simulation.step(served for _, served in present)
        letters = [*self.late, *self.simulation.letters.take()]
        self.late = letters if late else []
        if not late:
            self.simulation.deliver(letters)
        for task, served in present:
            self.simulation.tell(served, drawn[served.name])
            if task.leaves is not None and len(served.run.tokens) >= task.leaves:
                served.run.cancel()
        for task, served in self.tasks:
            if self._left(task, served):
                self.simulation.finish(served)


def run(simulation: Simulation, batch: tuple[Task, ...], moves: list[Move]) -> list[Served]:
    served = [
        simulation.add(
            task.prompt,
            block_of(task.program, len(task.prompt)) if task.program is not None else None,
            task.max_tokens,
            task.stops_below,
            block_of(task.edit, len(task.prompt), "edit ") if task.edit is not None else None,
        )
        for task in batch
    ]
    Schedule(simulation, list(zip(batch, served, strict=True))).run(list(moves))
    for each in served:
        assert each.run.settled
        assert all(each.run.values.get("landed", ()))
        assert all(each.run.values.get("edit landed", ()))
        assert each.run.error is None or isinstance(each.run.error, (Planned, RunCancelledError)), each.run.error
    assert not simulation.blocks.runs
    return served


def assert_same(got: Any, alone: Any) -> None:
    if isinstance(alone, torch.Tensor):
        torch.testing.assert_close(got, alone, rtol=1e-7, atol=1e-7)
    elif isinstance(alone, dict):
        assert got.keys() == alone.keys()
        for name, value in alone.items():
            assert_same(got[name], value)
    elif isinstance(alone, (list, tuple)):
        assert len(got) == len(alone)
        for one, other in zip(got, alone, strict=True):
            assert_same(one, other)
    else:
        assert got == alone


def seen(task: Task, served: Served) -> list[Any]:
    run = served.run
    tokens = [(token.id, token.saves, token.finish_reason) for token in run.tokens[: task.leaves]]
    left = task.leaves is not None and len(tokens) == task.leaves
    return [tokens] if left else [tokens, str(run.error), {} if run.error else run.values]


EXAMPLES = settings(
    max_examples=int(os.environ.get("SIM", "30")),
    deadline=None,
    derandomize="SIM" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@EXAMPLES
@given(batch=batches(requests=(1, 6), rows=(1, 10), tokens=(1, 8)), moves=MOVES)
def test_programs_in_drawn_steps(simulation, batch, moves):
    hold(simulation, batch, moves)


@EXAMPLES
@given(batch=batches(requests=(1, 6), rows=(1, 10), tokens=(1, 8), edits=True), moves=MOVES)
def test_programs_and_edits_in_drawn_steps(simulation, batch, moves):
    hold(simulation, batch, moves)


@EXAMPLES
@given(batch=batches(requests=(1, 6), rows=(1, 10), tokens=(1, 8)), moves=MOVES)
def test_a_program_does_as_an_edit_what_it_does_as_a_block(simulation, batch, moves):
    edited = tuple(replace(task, program=None, edit=task.program) for task in batch)
    note("\n".join(f"request {number}: {task}" for number, task in enumerate(batch)))
    own, edits = run(simulation, batch, moves), run(simulation, edited, moves)
    for task, one, other in zip(batch, own, edits, strict=True):
        assert_same(without_prefix(seen(task, other)), seen(task, one))
    simulation.requests.clear()


def without_prefix(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name).removeprefix("edit "): without_prefix(each) for name, each in value.items()}
    return type(value)(map(without_prefix, value)) if isinstance(value, (list, tuple)) else value


def hold(simulation: Simulation, batch: tuple[Task, ...], moves: list[Move]) -> None:
    note("\n".join(f"request {number}: {task}" for number, task in enumerate(batch)))
    together = run(simulation, batch, moves)
    for number, (task, served) in enumerate(zip(batch, together, strict=True)):
        (alone,) = run(simulation, (replace(task, joins=None),), [])
        try:
            assert_same(seen(task, served), seen(task, alone))
        except AssertionError as error:
            error.add_note(f"request {number}")
            raise
    simulation.requests.clear()
