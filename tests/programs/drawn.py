"""What Hypothesis draws: batches of requests, most of them with a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from tests.programs.program import AFTER, FIRST_ID, FORCES, LAYERS, SKIPPED, WITHIN, Loop, Op, Program


@dataclass(frozen=True)
class Task:
    """One request: when it joins (after so many tokens of an earlier one), what it does, and when its caller leaves.

    `edit` is a program that runs on it before its own.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    program: Program | None = None
    joins: tuple[int, int] | None = None
    leaves: int | None = None
    seed: int | None = None
    stops_below: int = 0
    edit: Program | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        drawn = {"temperature": 0.0} if self.seed is None else {"temperature": 0.9, "seed": self.seed}
        return {
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "stop_token_ids": list(range(FIRST_ID, self.stops_below)) or None,
            **drawn,
        }

    def __str__(self) -> str:
        words = [f"prompt={list(self.prompt)}, max_tokens={self.max_tokens}"]
        if self.joins is not None:
            words.append(f"joins after {self.joins[1]} tokens of request {self.joins[0]}")
        if self.leaves is not None:
            words.append(f"leaves after {self.leaves} tokens")
        if self.seed is not None:
            words.append(f"drawn with seed {self.seed}")
        if self.stops_below:
            words.append(f"stops at ids below {self.stops_below}")
        body = "no block" if self.program is None else str(self.program)
        edited = [] if self.edit is None else ["edited by", *str(self.edit).splitlines(), "and then"]
        return "\n    ".join([", ".join(words), *edited, *body.splitlines()])


EDITS = ("add", "scale", "row", "replace", "constant", "carry", "halves")
NUMBERS = st.integers(0, 7)


def weighted(*choices: tuple[int, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """One of several, each as often as its number says; it shrinks to the first."""
    table = [strategy for times, strategy in choices for _ in range(times)]
    return st.integers(0, len(table) - 1).flatmap(table.__getitem__)


def ops(longest: int) -> st.SearchStrategy[Op]:
    within, deeper, after = st.integers(0, LAYERS - 1), st.integers(1, LAYERS - 1), st.just(LAYERS)
    when = weighted((4, st.just("always")), (1, st.just("even step")), (1, st.just("even token")))

    def op(layer: Any, name: Sequence[str], action: Sequence[str], number: Any = NUMBERS) -> st.SearchStrategy[Op]:
        name, action = (
            each if isinstance(each, st.SearchStrategy) else st.sampled_from(each) for each in (name, action)
        )
        return st.builds(Op, layer, name, action, number, when)

    return weighted(
        (4, op(within, WITHIN, ["read"], st.just(0))),
        (8, op(within, WITHIN, EDITS)),
        (1, op(within, SKIPPED, ["skip"])),
        (1, op(within, ["resid_post"], ["lens"], st.just(0))),
        (1, op(deeper, WITHIN, ["late"], st.just(0))),
        (1, op(within, WITHIN, ["stop", "raise"], st.integers(0, longest))),
        (1, op(after, AFTER, ["read"], st.just(0))),
        (1, op(after, ["norm"], EDITS)),
        (1, op(after, ["logits"], (*EDITS, "favour"))),
        (1, op(after, ["samples"], FORCES)),
    )


def bodies(longest: int) -> st.SearchStrategy[tuple[Op, ...]]:
    in_order = lambda drawn: tuple(sorted(drawn, key=lambda op: op.order))  # noqa: E731
    return st.lists(ops(longest), min_size=1, max_size=8).map(in_order)


def subscripts(longest: int) -> st.SearchStrategy[Any]:
    step = st.integers(0, longest)
    return weighted(
        (4, st.just((None, None, None))),
        (2, st.tuples(st.none() | step, st.none() | step, st.none() | st.integers(1, 3))),
        (1, step),
        (1, st.lists(step, min_size=1, max_size=3)),
    )


def programs(longest: int) -> st.SearchStrategy[Program]:
    loops = st.lists(st.builds(Loop, subscripts(longest), bodies(longest)), min_size=1, max_size=2).map(tuple)
    single = st.builds(Loop, st.none(), bodies(longest)).map(lambda loop: (loop,))
    cached = st.lists(st.integers(0, LAYERS - 1), max_size=2, unique=True).map(tuple)
    return st.builds(Program, weighted((4, loops), (1, single)), weighted((2, st.just(())), (1, cached)))


def batches(
    *, requests: tuple[int, int], rows: tuple[int, int], tokens: tuple[int, int], edits: bool = False
) -> st.SearchStrategy[tuple[Task, ...]]:
    """From so many requests to so many, with from so many rows in a prompt to so many, and tokens drawn.

    `edits`: some of them have an edit.
    """
    fewest, most = requests
    longest = tokens[1]
    task = st.builds(
        Task,
        prompt=st.lists(st.integers(FIRST_ID, 511), min_size=rows[0], max_size=rows[1]).map(tuple),
        max_tokens=st.integers(*tokens),
        program=weighted((1, st.none()), (3, programs(longest))),
        joins=weighted((1, st.none()), (1, st.tuples(st.integers(0, most), st.integers(0, longest // 2)))),
        leaves=weighted((3, st.none()), (1, st.integers(1, longest))),
        seed=weighted((3, st.none()), (1, NUMBERS)),
        stops_below=weighted((4, st.just(0)), (1, st.just(64))),
        edit=weighted((1, st.none()), (1, programs(longest))) if edits else st.none(),
    )
    return st.lists(task.map(_knowable), min_size=fewest, max_size=most).map(_joining_earlier_ones)


def _knowable(task: Task) -> Task:
    """Which token a seed drew is known by what was let out, which is another one where it was forced."""
    return replace(task, seed=None) if task.program is not None and task.program.reads_what_it_forces else task


def _joining_earlier_ones(tasks: list[Task]) -> tuple[Task, ...]:
    return tuple(
        task if task.joins is None else replace(task, joins=(task.joins[0] % number, task.joins[1]) if number else None)
        for number, task in enumerate(tasks)
    )
