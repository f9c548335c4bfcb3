"""Several runs as one, and the window of a map, fed by hand."""

from __future__ import annotations

import gc
from typing import Any
from weakref import ref

import pytest

from nnsight_async import NotSavedError, RunCancelledError, Saved
from nnsight_async.capture.block import Block
from nnsight_async.runs.frames import Frame
from nnsight_async.runs.group import Invokes, Sequences
from nnsight_async.runs.request import Request
from nnsight_async.runs.run import Run
from nnsight_async.runs.window import Window


def run(*names: str, invoke: int = 0) -> Run:
    block = Block(b"", names, "file.py", 1, "function")
    return Run(Request({"prompt_token_ids": [1, 2]}, None, invoke=invoke), block)


def output(*ids: int, finished: bool = False) -> Any:
    from vllm import CompletionOutput, RequestOutput

    completion = CompletionOutput(0, "", list(ids), None, None, finish_reason="length" if finished else None)
    return RequestOutput("r", None, [1, 2], None, [completion], finished)


def end(one: Run, *ids: int, **values: Any) -> None:
    entries = [(name, "set", value) for name, value in values.items()]
    one.feed_frame(Frame(one.key, len(one.tokens), entries, done=True, number=one.ledger.frames[0]))
    one.feed_output(output(*ids, finished=True))


def test_tokens_in_the_order_in_which_they_come():
    first, second = run("x"), run("x", invoke=1)
    group = Invokes([first, second])
    second.feed_frame(Frame(second.key, 0, [("x", "set", 1)]))
    second.feed_output(output(8))
    end(first, 7, x=2)
    assert not group.settled
    end(second, 9)
    assert [(token.invoke, token.id, token.saves) for token in group.tokens] == [
        (1, 8, {"x": 1}),
        (0, 7, {"x": 2}),
        (1, 9, {}),
    ]
    assert group.settled
    assert group.value("x") == [2, 1]


def test_a_name_of_one_invoke_waits_for_that_one_alone():
    first, second = run("x"), run("y", invoke=1)
    group = Invokes([first, second])
    mine, other = Saved(group, "x"), Saved(group, "y")
    end(first, 7, x="value")
    assert (mine.done(), other.done(), group.final()) == (True, False, False)
    assert mine.result(timeout=0) == "value"


def test_names_that_only_the_run_knows():
    first, second = run(), run(invoke=1)
    group = Invokes([first, second])
    saved = Saved(group, "dynamic")
    end(first, 7, dynamic=1)
    assert not saved.done()
    end(second, 8)
    assert saved.result(timeout=0) == 1
    with pytest.raises(NotSavedError, match="it saved dynamic"):
        group.value("other")


def test_a_failure_is_that_of_the_names_of_its_run():
    first, second = run("x", "both"), run("y", "both", invoke=1)
    group = Invokes([first, second])
    end(first, 7, x=1, both=1)
    second.fail(LookupError("second"))
    assert group.settled
    assert group.values == {"x": 1}
    assert group.value("x") == 1
    for name in ("y", "both"):
        with pytest.raises(LookupError):
            group.value(name)
    with pytest.raises(LookupError):
        group.outcome()


def test_sequences_inside_invokes():
    twice = Sequences([run("x"), run("x")])
    once = run("x", invoke=1)
    group = Invokes([twice, once])
    for at, one in enumerate(group.runs()):
        end(one, at, x=at)
    assert group.value("x") == [[0, 1], 2]
    first, second = group.outcome()
    assert [(completion.index, completion.token_ids) for completion in first.outputs] == [(0, [0]), (1, [1])]
    assert (first.saves, second.saves) == ({"x": [0, 1]}, {"x": 2})
    assert len(group.tokens) == 3


def test_cancelling_a_group_and_a_part():
    parts = [run("x"), run("x")]
    group = Invokes(parts)
    parts[0].cancel()
    assert not group.settled
    group.cancel()
    assert group.settled
    with pytest.raises(RunCancelledError):
        group.outcome()


def test_what_has_ended_is_freed_at_once():
    group = Invokes([run("x"), Sequences([run("x"), run("x")])])
    for one in group.runs():
        end(one, 7, x=1)
    watched = [ref(group), *map(ref, group.runs())]
    gc.disable()
    try:
        del group, one
        assert [reference() for reference in watched] == [None] * 4
    finally:
        gc.enable()


def test_a_window_has_room_for_the_runs_that_go_and_as_many_results():
    window = Window(2, ordered=True)
    jobs = [run("x") for _ in range(4)]
    for job in jobs[:2]:
        assert window.has_room
        window.add("prompt", job)
    assert not window.has_room
    end(jobs[1], 7, x=1)
    assert window.has_room
    assert not window.ready
    window.add_failed("bad", ValueError("bad"))
    window.add("prompt", jobs[2])
    assert not window.has_room
    end(jobs[0], 7, x=0)
    assert [window.take().index for _ in range(3)] == [0, 1, 2]
    assert not window.ready
    window.cancel()
    assert window.empty
    assert jobs[2].settled


def test_a_window_gives_what_ends_first():
    window = Window(3, ordered=False)
    jobs = [run("x") for _ in range(3)]
    for job in jobs:
        window.add("prompt", job)
    end(jobs[2], 7, x=2)
    jobs[0].fail(LookupError())
    taken = [window.take(), window.take()]
    assert [result.index for result in taken] == [2, 0]
    assert taken[0].saves == {"x": 2}
    assert isinstance(taken[1].error, LookupError)
