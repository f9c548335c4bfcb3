"""Ends of steps and what is made of them, with a runner made up here: no engine."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.clock import StepClock, delays
from benchmarks.measure import Measured
from benchmarks.options import parse
from benchmarks.report import latency_table


class Runner:
    """Runs what it is given and draws nothing."""

    def execute_model(self, scheduled: Any) -> list[str]:
        return list(scheduled.num_scheduled_tokens)

    def sample_tokens(self, grammar: None) -> str:
        return "drawn"


def scheduled(*going: str, new: tuple[tuple[str, list[int]], ...] = ()) -> Any:
    requests = [SimpleNamespace(req_id=name, prompt_token_ids=prompt) for name, prompt in new]
    return SimpleNamespace(scheduled_new_reqs=requests, num_scheduled_tokens=dict.fromkeys(going, 1))


def test_every_request_of_a_step_gets_its_end():
    runner = Runner()
    clock = StepClock(runner)
    times = [time.monotonic()]
    for step in (
        scheduled("a", new=(("a", [1]),)),
        scheduled("a", "b", new=(("b", [2, 3]),)),
        scheduled("b"),
    ):
        assert runner.execute_model(step) == list(step.num_scheduled_tokens)
        assert runner.sample_tokens(None) == "drawn"
        times.append(time.monotonic())
    clock.stop()
    runner.execute_model(scheduled("a"))
    runner.sample_tokens(None)

    assert not vars(runner)
    (first, of_a), (second, of_b) = clock.ended
    assert (first, second) == ([1], [2, 3])
    assert times[0] <= of_a[0] <= times[1] <= of_a[1] == of_b[0] <= times[2] <= of_b[1] <= times[3]
    assert (len(of_a), len(of_b)) == (2, 2)


def test_delays_are_from_the_end_of_the_very_step_to_its_token():
    ended = [([2], [10.0, 20.0]), ([1], [1.0, 2.0, 3.0])]  # the first ran a step more
    assert delays([[1], [2]], [[1.5, 2.25], [10.125, 20.0]], ended) == [0.5, 0.25, 0.125, 0.0]
    with pytest.raises(AssertionError, match="not noted"):
        delays([[2]], [[1.0, 2.0, 3.0]], ended)


def test_what_a_token_takes_longer_is_compared_within_a_turn():
    cells = {
        ("plain", 8): [{"step": 0.010, "delays": [0.001, 0.002]}, {"step": 0.100, "delays": [0.003, 0.003]}],
        ("one", 8): [{"step": 0.011, "delays": [0.004, 0.004]}, {"step": 0.120, "delays": [0.004, 0.004]}],
    }
    measured = Measured(["plain", "one"], {}, cells)
    rows = [line.split("|") for line in latency_table(measured, parse(["--requests", "8"])).splitlines()]
    plain, one = ([part.strip() for part in row[1:-1]] for row in rows[2:])
    assert plain == ["8", "plain", "2,500", "3,000", "", "", ""]
    assert one == ["8", "one", "4,000", "4,000", "+1,500", "+15.0 %", "+10.0 to +20.0"]
