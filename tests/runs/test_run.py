"""Tokens and frames joined in whatever order they come, without an engine."""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from nnsight_async import RunCancelledError, Saved, SaveError, ValuesLostError
from nnsight_async.capture.block import Block
from nnsight_async.capture.constants import constant
from nnsight_async.runs import failures
from nnsight_async.runs.frames import Frame
from nnsight_async.runs.ledger import Ledger
from nnsight_async.runs.request import Request
from nnsight_async.runs.run import Run
from nnsight_async.runs.stream import Stream


def block(*names: str) -> Block:
    return Block(b"", names, "file.py", 1, "function")


@pytest.fixture
def run() -> Run:
    return Run(Request({"prompt_token_ids": [1, 2]}, None), block("x"))


def output(*ids: int, finished: bool = False, text: str | None = None) -> Any:
    from vllm import CompletionOutput, RequestOutput

    words = "".join(f"<{number}>" for number in ids) if text is None else text
    reason = "length" if finished else None
    completion = CompletionOutput(0, words, list(ids), None, None, finish_reason=reason)
    return RequestOutput("r", None, [1, 2], None, [completion], finished)


def frame(run: Run, step: int, value: Any = None, **more: Any) -> Frame:
    """The next frame of the run, unless `number=` says otherwise."""
    entries = [] if value is None else [("x", "set", value)]
    return Frame(run.key, step, entries, **{"number": run.ledger.frames[0], **more})


def told(run: Run) -> list[tuple[int, dict[str, Any]]]:
    return [(token.id, token.saves) for token in run.tokens]


def test_a_token_waits_for_the_frame_of_its_step(run):
    run.feed_output(output(7))
    assert told(run) == []
    run.feed_frame(frame(run, 0, "a"))
    assert told(run) == [(7, {"x": "a"})]


def test_frames_that_come_before_their_tokens(run):
    run.feed_frame(frame(run, 0, "a"))
    run.feed_frame(frame(run, 1, "b", done=True))
    run.feed_output(output(7))
    assert told(run) == [(7, {"x": "a"})]
    run.feed_output(output(8, finished=True))
    assert told(run) == [(7, {"x": "a"}), (8, {"x": "b"})]
    assert run.settled
    assert run.value("x") == "b"


def test_several_tokens_in_one_output(run):
    run.feed_frame(frame(run, 0, "a"))
    run.feed_frame(frame(run, 1, "b", done=True))
    run.feed_output(output(7, 8, 9, finished=True))
    assert told(run) == [(7, {"x": "a"}), (8, {"x": "b"}), (9, {})]
    assert "".join(token.text for token in run.tokens) == run.outcome().outputs[0].text == "<7><8><9>"
    assert [token.finish_reason for token in run.tokens] == [None, None, "length"]


def test_what_is_saved_after_the_last_step(run):
    run.feed_frame(frame(run, 0))
    run.feed_output(output(7, finished=True))
    assert not run.settled
    run.feed_frame(frame(run, 0, "late", done=True, ended=True))
    assert run.settled
    assert run.value("x") == "late"


def test_a_step_that_drew_no_token_is_left_out(run):
    run.feed_frame(frame(run, 0, "a"))
    run.feed_output(output(7, finished=True))
    run.feed_frame(frame(run, 1, "zombie"))
    run.feed_frame(frame(run, 1, done=True, ended=True))
    assert run.value("x") == "a"


def test_stop_cuts_what_was_drawn_after_it(run):
    called: list[str] = []
    run.when_settled(lambda: called.append("settled"))
    for number in (7, 8, 9):
        run.feed_output(output(number))
    run.feed_frame(frame(run, 0, "a"))
    run.feed_frame(frame(run, 1, "b", done=True, stopped=True))
    assert [token.id for token in run.tokens] == [7, 8]
    assert run.tokens[-1].finish_reason == "stop"
    assert run.outcome().outputs[0].token_ids == [7, 8]
    assert run.outcome().outputs[0].text == "<7><8>"
    assert run.outcome().finished
    assert called == ["settled"]


def test_frames_and_outputs_after_the_end_change_nothing(run):
    run.feed_frame(frame(run, 0, "a"))
    run.feed_output(output(7))
    run.cancel()
    run.feed_frame(frame(run, 1, "b"))
    run.feed_output(output(8))
    assert told(run) == [(7, {"x": "a"})]
    with pytest.raises(RunCancelledError):
        run.value("x")


def test_a_run_settled_before_anyone_asked(run):
    called: list[str] = []
    run.cancel()
    run.when_settled(lambda: called.append("settled"))
    assert called == ["settled"]


def test_an_error_raised_many_times_keeps_one_traceback(run):
    run.feed_frame(frame(run, 0, error=failures.pack(KeyError("x"), "in step 0")))
    lengths: set[int] = set()
    for _ in range(3):
        with pytest.raises(KeyError) as caught:
            run.outcome()
        lengths.add(len(caught.traceback))
    assert len(lengths) == 1
    assert caught.value.__notes__ == ["in step 0", "prompt: [1, 2]"]


async def test_waiting_in_a_loop_and_in_a_thread(run):
    saved = Saved(run, "x")
    in_thread = asyncio.create_task(asyncio.to_thread(saved.result, 10))
    in_loop = asyncio.ensure_future(saved._final())
    run.feed_frame(frame(run, 0, "a", done=True))
    run.feed_output(output(7))
    assert await in_loop == await in_thread == await saved == "a"
    with pytest.raises(TimeoutError):
        Saved(Run(run.request, block("y")), "y").result(timeout=0)


async def test_a_stream_that_dies_aborts_its_run_and_one_that_ended_does_not(run):
    run.feed_frame(frame(run, 0, "a", done=True))
    run.feed_output(output(7, finished=True))
    assert [token.id async for token in Stream(run)] == [7]
    assert run.error is None
    other = Run(run.request)
    stream = Stream(other)
    del stream
    assert isinstance(other.error, RunCancelledError)


def failed(run: Run, step: int, **more: Any) -> Frame:
    return frame(run, step, done=True, error=failures.pack(ValueError("no"), f"in step {step}"), **more)


def test_an_error_comes_after_the_tokens_of_the_steps_before_it(run):
    run.feed_frame(frame(run, 0, "a"))
    run.feed_frame(failed(run, 1))
    assert not run.settled
    run.feed_output(output(7, 8))
    assert told(run) == [(7, {"x": "a"})]
    assert isinstance(run.error, ValueError)


def test_an_error_in_a_step_past_the_end_is_none(run):
    """vLLM runs one step more under async scheduling when a request ends by its token."""
    run.feed_frame(frame(run, 0, "a"))
    run.feed_frame(failed(run, 1))
    run.feed_output(output(7, finished=True))
    assert run.settled
    assert run.error is None
    assert told(run) == [(7, {"x": "a"})]


def test_an_error_after_the_last_step_comes_when_all_tokens_have(run):
    run.feed_frame(frame(run, 0, "a"))
    run.feed_frame(failed(run, 0, ended=True))
    assert not run.settled
    run.feed_output(output(7, finished=True))
    assert told(run) == [(7, {"x": "a"})]
    assert isinstance(run.error, ValueError)


def test_what_was_sent_is_not_held_with_the_values() -> None:
    large = constant(torch.zeros(1 << 20, dtype=torch.uint8))
    run = Run(Request({"prompt_token_ids": [1, 2]}, None), replace(block("x"), payload=b"code", constants=(large,)))
    gone = weakref.ref(large)
    del large

    run.unload()

    assert run.block == block("x")
    assert gone() is None


def test_an_error_brings_what_the_block_was_handling_and_not_what_the_caller_is(run):
    error = ValueError("the block's")
    error.__context__ = KeyError("handled in the block")
    run.fail(error)
    for _ in range(2):
        try:
            raise OSError("handled by the caller")
        except OSError:
            with pytest.raises(ValueError, match="the block's") as caught:
                run.outcome()
        assert isinstance(caught.value.__context__, KeyError)


def test_what_a_caller_was_handling_once_is_not_part_of_the_error_later(run):
    run.fail(ValueError("the block's"))
    try:
        raise OSError("handled by the caller")
    except OSError:
        with pytest.raises(ValueError, match="the block's") as caught:
            run.outcome()
    assert isinstance(caught.value.__context__, OSError)
    with pytest.raises(ValueError, match="the block's") as caught:
        run.outcome()
    assert caught.value.__context__ is None


def awaits(run: Run) -> bool:
    return run.awaited() == [(run.key, run.ledger)]


def test_a_frame_that_is_missing(run):
    run.feed_frame(frame(run, 0, "a"))
    run.feed_output(output(7, 8))
    assert awaits(run)
    with pytest.raises(ValuesLostError, match="step 1 were lost"):
        run.feed_frame(frame(run, 2, "c", number=2))


def test_the_frame_before_the_end_is_missing(run):
    run.feed_frame(frame(run, 0, "a"))
    with pytest.raises(ValuesLostError, match="step 1 were lost"):
        run.feed_frame(frame(run, 1, "c", number=2, ended=True, done=True))


def test_a_frame_that_comes_twice(run):
    run.feed_frame(frame(run, 0, "a"))
    with pytest.raises(ValuesLostError):
        run.feed_frame(frame(run, 0, "a", number=0))


def test_what_the_worker_has_sent_and_what_has_come(run):
    run.feed_frame(frame(run, 0, "a"))
    assert not run.ledger.misses({0: 1})
    assert run.ledger.misses({0: 2})
    assert run.ledger.misses({})  # it has ended there
    run.feed_frame(frame(run, 0, done=True, ended=True))
    assert not run.ledger.misses({})


def test_a_run_waits_for_frames_only_while_vllm_is_ahead(run):
    assert not awaits(run)
    run.feed_output(output(7))
    assert awaits(run)
    run.feed_frame(frame(run, 0, "a"))
    assert not awaits(run)
    run.feed_frame(frame(run, 1, "b"))
    assert not awaits(run)
    run.feed_output(output(8, finished=True))
    assert awaits(run)  # what is saved after the last step
    run.feed_frame(frame(run, 1, done=True, ended=True))
    assert not awaits(run)


def wakes(run: Run) -> list[int]:
    """How many tokens were out each time that somebody who waits was woken."""
    seen: list[int] = []

    def woken() -> None:
        seen.append(len(run.tokens))
        run.changed.once(woken)

    run.changed.once(woken)
    return seen


@pytest.mark.parametrize("first", ["output", "frame"])
def test_a_token_wakes_who_waits_once_and_what_is_half_of_it_does_not(run, first):
    seen = wakes(run)
    for step in range(3):
        feeds = [lambda: run.feed_output(output(7)), lambda step=step: run.feed_frame(frame(run, step, step))]
        for feed in feeds if first == "output" else feeds[::-1]:
            assert len(seen) == step
            feed()
    assert seen == [1, 2, 3]


def test_a_request_without_a_block_wakes_once_a_token():
    run = Run(Request({"prompt_token_ids": [1, 2]}, None))
    seen = wakes(run)
    for _ in range(3):
        run.feed_output(output(7))
    assert seen == [1, 2, 3]


def test_a_value_that_is_final_before_the_end_wakes_who_waits(run):
    run.feed_frame(frame(run, 0, "a"))
    run.feed_output(output(7))
    seen = wakes(run)
    run.feed_frame(frame(run, 0, done=True))
    assert seen == [1]
    assert run.final("x")
    assert not run.settled


def test_leaving_in_the_middle_of_a_step(run):
    """The one half has come, the other comes too late; whoever waits is told that it is over."""
    run.feed_output(output(7))
    seen = wakes(run)
    run.cancel()
    assert seen == [0]
    run.feed_frame(frame(run, 0, "a"))
    assert seen == [0]
    assert told(run) == []


def test_a_stop_that_comes_before_its_token(run):
    run.feed_frame(frame(run, 0, "a", done=True, stopped=True))
    assert not run.settled
    run.feed_output(output(7, 8))
    assert run.settled
    assert [(token.id, token.finish_reason) for token in run.tokens] == [(7, "stop")]
    assert run.outcome().outputs[0].token_ids == [7]


def test_the_whole_output_is_there_when_the_run_has_ended(run):
    for step in range(4):
        run.feed_output(output(step, finished=step == 3))
        run.feed_frame(frame(run, step, step, done=step == 3))
    whole = run.outcome().outputs[0]
    assert (whole.token_ids, whole.text, whole.finish_reason) == ([0, 1, 2, 3], "<0><1><2><3>", "length")


def test_two_blocks_of_a_request_whose_frames_come_apart():
    run = Run(Request({"prompt_token_ids": [1, 2]}, None), block("x"))
    run.ledger = Ledger(["edit 1", "the block"])
    run.feed_output(output(7))
    run.feed_frame(Frame(run.key, 0, [("y", "set", 1)], size=3, part=0))
    assert told(run) == []
    run.feed_frame(Frame(run.key, 0, [("x", "set", 2)], size=4, part=1))
    assert told(run) == [(7, {"y": 1, "x": 2})]
    assert run.steps[0].size == 7
    with pytest.raises(SaveError, match="the block saves 'y', and edit 1 does too"):
        run.feed_frame(Frame(run.key, 1, [("y", "set", 2)], part=1, number=1))
