"""A run keeps so many bytes of values for those who read it step by step, and says so when that was too little."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

import pytest
import torch

from nnsight_async import SlowConsumerError
from nnsight_async.runs.group import Sequences
from nnsight_async.runs.history import Buffer, SlowConsumers
from nnsight_async.runs.request import Request
from nnsight_async.runs.run import Run
from nnsight_async.runs.saved import Saved
from nnsight_async.runs.stream import Stream
from tests.runs.test_run import block, frame, output, told

SIZE = 100  # bytes of what each step saves here


def run_that_keeps(steps: int, slow_consumers: SlowConsumers = "fail") -> Run:
    run = Run(Request({"prompt_token_ids": [1, 2]}, None), block("x"))
    run.buffer = Buffer(steps * SIZE, slow_consumers)
    return run


def advance(run: Run, *steps: int, last: bool = False) -> None:
    """Let the run come to the end of these steps, in which it saves their numbers."""
    for step in steps:
        end = last and step == steps[-1]
        run.feed_frame(frame(run, step, step, size=SIZE, done=end))
        run.feed_output(output(step, finished=end))


def read(reader: Any, number: int) -> list[tuple[int, Any, bool]]:
    async def some() -> list[tuple[int, Any, bool]]:
        tokens = [await anext(reader) for _ in range(number)]
        return [(token.index, token.saves.get("x"), token.dropped) for token in tokens]

    return asyncio.run(some())


def test_what_is_read_in_time_makes_room():
    run = run_that_keeps(2)
    stream = Stream(run)
    for step in range(0, 20, 2):
        advance(run, step, step + 1)
        assert read(stream, 2) == [(step, step, False), (step + 1, step + 1, False)]
    assert run.error is None
    assert run.buffer.dropped == 18  # all but what is still kept


def test_a_reader_who_is_too_slow_fails_the_run_after_what_was_kept():
    run = run_that_keeps(3)
    stream = Stream(run)
    over: list[str] = []
    run.when_settled(lambda: over.append("aborted"))
    advance(run, 0)
    assert read(stream, 1) == [(0, 0, False)]
    advance(run, 1, 2, 3)
    assert not over
    advance(run, 4, 5)
    assert over == ["aborted"]
    assert read(stream, 4) == [(1, 1, False), (2, 2, False), (3, 3, False), (4, 4, False)]
    with pytest.raises(SlowConsumerError, match=r"max_buffered_bytes=300 .*slow_consumers"):
        read(stream, 1)
    with pytest.raises(BufferError):
        run.outcome()


def test_a_reader_who_is_too_slow_may_go_on_without_the_oldest():
    run = run_that_keeps(2, "drop")
    stream = Stream(run)
    advance(run, 0, 1, 2, 3, last=True)
    assert read(stream, 4) == [(0, None, True), (1, None, True), (2, 2, False), (3, 3, False)]
    assert run.outcome().saves == {"x": 3}
    assert run.buffer.dropped == 2


def test_values_that_are_streamed_by_name():
    run = run_that_keeps(2, "drop")

    async def values() -> list[Any]:
        found = []
        async for value in Saved(run, "x").stream():
            found.append(value)
            if value == 0:
                advance(run, 1, 2, 3, last=True)
        return found

    advance(run, 0)
    assert asyncio.run(values()) == [0, 2, 3]


def test_nobody_reads_by_steps_then_only_final_values_are_kept():
    run = run_that_keeps(2)
    advance(run, 0, 1, 2, 3, last=True)
    assert run.outcome().saves == {"x": 3}
    assert told(run) == [(0, {}), (1, {}), (2, {"x": 2}), (3, {"x": 3})]
    with pytest.raises(SlowConsumerError):  # who comes too late is told so
        read(Stream(run), 1)


def test_the_newest_step_is_kept_however_large_it_is():
    run = run_that_keeps(0)
    stream = Stream(run)
    for step in range(3):
        advance(run, step)
        assert read(stream, 1) == [(step, step, False)]


def test_steps_without_values_take_no_room():
    run = run_that_keeps(1)
    stream = Stream(run)
    advance(run, 0)
    for step in range(1, 50):
        run.feed_frame(frame(run, step))
        run.feed_output(output(step))
    assert run.error is None
    assert len(read(stream, 50)) == 50


def test_what_was_dropped_is_freed():
    run = run_that_keeps(1)
    tensor = torch.zeros(25)
    alive = weakref.ref(tensor)
    run.feed_frame(frame(run, 0, tensor, size=SIZE))
    run.feed_output(output(0))
    del tensor
    assert alive() is not None
    advance(run, 1)
    assert alive() is None


def test_runs_of_a_group_have_room_each_and_one_reader_of_all():
    runs = [run_that_keeps(1) for _ in range(2)]
    group = Sequences(runs)
    stream = Stream(group)
    advance(runs[0], 0)
    advance(runs[1], 0)
    assert read(stream, 2) == [(0, 0, False)] * 2
    advance(runs[1], 1, 2)
    assert isinstance(runs[1].error, SlowConsumerError)
    advance(runs[0], 1, last=True)
    assert runs[0].error is None
    assert [token.saves for token in runs[0].tokens] == [{}, {"x": 1}]
