"""Messages between the stages of a pipeline."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nnsight_async import StageError
from nnsight_async.interleave.locations import Location
from nnsight_async.interleave.passed import Failed, Opaque, Visited, portable
from nnsight_async.worker.wire import ProcessWire, packed, unpacked


@pytest.fixture
def home() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="wire-") as folder:  # a short path, as sockets need
        yield folder


def over_the_wire(value: Any) -> Any:
    return unpacked([bytes(frame) for frame in packed(value)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64])
@pytest.mark.parametrize("shape", [(), (0, 4), (3,), (2, 3, 4)])
def test_tensors_arrive_as_they_are(dtype, shape):
    sent = torch.randn(shape).to(dtype)
    got = over_the_wire(sent)
    assert got.dtype == dtype
    assert got.shape == sent.shape
    assert torch.equal(got.reshape(-1).view(torch.uint8), sent.reshape(-1).view(torch.uint8))


def test_a_part_of_a_tensor_is_sent_without_the_rest():
    rows = torch.arange(1 << 16)[:2]
    assert sum(len(bytes(frame)) for frame in packed(rows)) < 1000
    assert over_the_wire(rows).tolist() == [0, 1]


def test_what_arrives_is_nobody_elses():
    sent = [torch.zeros(3), {"inner": (torch.zeros(2), None, "text")}]
    got = over_the_wire(sent)
    got[0] += 1
    got[1]["inner"][0][:] = 7
    assert sent[0].sum() == 0
    assert sent[1]["inner"][0].sum() == 0


def test_objects_stay_where_they_are():
    event = Location("model", "inputs")
    visited = over_the_wire(Visited(event, 2, portable(((torch.ones(2), threading.Lock()), {}))))
    (ones, lock), _ = visited.value
    assert visited.event == event
    assert ones.tolist() == [1, 1]
    assert isinstance(lock, Opaque)
    with pytest.raises(NotImplementedError, match="only tensors and plain values"):
        lock.acquire()


class OwnError(Exception):
    def __init__(self, one: str, other: str) -> None:
        super().__init__(one)


@pytest.mark.parametrize(("error", "kind"), [(KeyError("a"), KeyError), (OwnError("a", "b"), RuntimeError)])
def test_errors_arrive(error, kind):
    got = over_the_wire(Failed.of(error)).error
    assert type(got) is kind
    assert "a" in str(got)


def wires(home: str, processes: list[int], answer: Callable[[Any], Any], patience: float = 20.0) -> list[ProcessWire]:
    return [ProcessWire(home, stage, processes, answer, patience) for stage in range(len(processes))]


def test_messages_keep_their_order_and_their_sender(home):
    first, second, third = wires(home, [os.getpid()] * 3, str)
    for number in range(3):
        second.say(("second", number), [0])
        third.say(("third", number), [0, 1])
    assert [first.hear(2) for _ in range(3)] == [("third", number) for number in range(3)]
    assert [first.hear(1) for _ in range(3)] == [("second", number) for number in range(3)]
    assert second.hear(2) == ("third", 0)
    assert not first.heard(1)


def test_a_stage_answers_from_another_thread(home):
    def answer(question: Any) -> Any:
        if question is None:
            raise LookupError("nothing was asked")
        return question * 2, threading.current_thread().name

    first, _ = wires(home, [os.getpid()] * 2, answer)
    doubled, thread = first.ask(1, torch.ones(2))
    assert doubled.tolist() == [2, 2]
    assert thread == "nnsight-stage"
    with pytest.raises(LookupError, match="nothing was asked"):
        first.ask(1, None)
    assert first.ask(1, 3)[0] == 6


def ended() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_stage_that_has_ended_is_not_waited_for(home):
    wire = ProcessWire(home, 0, [os.getpid(), ended()], str, 1e6)
    with pytest.raises(StageError, match="stage 1 of the pipeline has ended, and stage 0 waits for it"):
        wire.hear(1)
    with pytest.raises(StageError, match="stage 1 of the pipeline has ended"):
        wire.ask(1, "anything")


def test_one_that_says_nothing_is_waited_for_within_bounds(home):
    wire = ProcessWire(home, 0, [os.getpid()] * 2, str, 0.0)
    with pytest.raises(StageError, match="stage 1 of the pipeline has said nothing for 0 seconds"):
        wire.hear(1)
