"""What Hypothesis draws: batches of requests, most of them with a program."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from tests.programs.program import AFTER, FIRST_ID, LAYERS, SKIPPED, WITHIN, Loop, Op, Program


@dataclass(frozen=True)
class Task:
    """One request: when it joins (after so many tokens of an earlier one), what it does, and when its caller leaves."""

    prompt: tuple[int, ...]
    max_tokens: int
    program: Program | None = None
    joins: tuple[int, int] | None = None
    leaves: int | None = None
    seed: int | None = None
    stops_below: int = 0

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
        return "\n    ".join([", ".join(words), *body.splitlines()])


EDITS = ("add", "scale", "row", "replace", "constant", "carry", "halves")
WHEN = st.sampled_from(("always", "even step", "even token"))
NUMBERS = st.integers(0, 7)


def ops(longest: int) -> st.SearchStrategy[Op]:
    layers = st.integers(0, LAYERS - 1)
    ending = st.builds(
        Op, layers, st.sampled_from(WITHIN), st.sampled_from(("stop", "raise")), st.integers(0, longest), WHEN
    )
    return st.one_of(
        st.builds(Op, layers, st.sampled_from(WITHIN), st.just("read"), st.just(0), WHEN),
        st.builds(Op, layers, st.sampled_from(WITHIN), st.sampled_from(EDITS), NUMBERS, WHEN),
        st.builds(Op, layers, st.sampled_from(WITHIN), st.sampled_from(EDITS), NUMBERS, WHEN),
        st.builds(Op, layers, st.sampled_from(SKIPPED), st.just("skip"), NUMBERS, WHEN),
        st.builds(Op, layers, st.just("resid_post"), st.just("lens"), st.just(0), WHEN),
        st.builds(Op, st.integers(1, LAYERS - 1), st.sampled_from(WITHIN), st.just("late"), st.just(0), WHEN),
        ending,
        st.builds(Op, st.just(LAYERS), st.sampled_from(AFTER), st.just("read"), st.just(0), WHEN),
        st.builds(Op, st.just(LAYERS), st.just("norm"), st.sampled_from(EDITS), NUMBERS, WHEN),
        st.builds(Op, st.just(LAYERS), st.just("logits"), st.sampled_from((*EDITS, "favour")), NUMBERS, WHEN),
        st.builds(Op, st.just(LAYERS), st.just("samples"), st.sampled_from(("force", "constant")), NUMBERS, WHEN),
    )


def bodies(longest: int) -> st.SearchStrategy[tuple[Op, ...]]:
    return st.lists(ops(longest), max_size=5).map(lambda drawn: tuple(sorted(drawn, key=lambda op: op.order)))


def subscripts(longest: int) -> st.SearchStrategy[Any]:
    step = st.integers(0, longest)
    return st.one_of(
        st.just((None, None, None)),
        st.tuples(st.none() | step, st.none() | step, st.none() | st.integers(1, 3)),
        step,
        st.lists(step, min_size=1, max_size=3),
    )


def programs(longest: int) -> st.SearchStrategy[Program]:
    loops = st.lists(st.builds(Loop, subscripts(longest), bodies(longest)), max_size=2).map(tuple)
    single = st.builds(Loop, st.none(), bodies(longest)).map(lambda loop: (loop,))
    cached = st.lists(st.integers(0, LAYERS - 1), max_size=2, unique=True).map(tuple)
    return st.builds(Program, st.one_of(loops, loops, single), st.one_of(st.just(()), cached))


def batches(*, requests: int, rows: int, longest: int) -> st.SearchStrategy[tuple[Task, ...]]:
    """At most so many requests, with at most so many rows in a prompt and tokens drawn."""
    drawn = programs(longest)
    task = st.builds(
        Task,
        prompt=st.lists(st.integers(FIRST_ID, 511), min_size=1, max_size=rows).map(tuple),
        max_tokens=st.integers(1, longest),
        program=st.one_of(st.none(), drawn, drawn, drawn),
        joins=st.none() | st.tuples(st.integers(0, requests), st.integers(0, longest // 2)),
        leaves=st.one_of(st.none(), st.none(), st.integers(1, longest)),
        seed=st.one_of(st.none(), st.none(), NUMBERS),
        stops_below=st.sampled_from((0, 0, 64, 256)),
    )
    return st.lists(task, min_size=1, max_size=requests).map(_joining_earlier_ones)


def _joining_earlier_ones(tasks: list[Task]) -> tuple[Task, ...]:
    return tuple(
        task if task.joins is None else replace(task, joins=(task.joins[0] % number, task.joins[1]) if number else None)
        for number, task in enumerate(tasks)
    )
