from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from nnsight_async import RunCancelledError, Token, ValuesLostError
from nnsight_async.engine.foreign import Foreign
from nnsight_async.runs import frames
from nnsight_async.runs import unread as unread_module
from nnsight_async.runs.edit import Installed
from nnsight_async.runs.frames import Frame, Message, Together
from nnsight_async.runs.kept import GRACE, Kept
from nnsight_async.runs.ledger import Ledger
from nnsight_async.runs.packing import Tensors, pack
from nnsight_async.runs.request import Request
from nnsight_async.runs.run import Run
from nnsight_async.runs.unread import Unread
from tests.runs.test_run import block, output

RUNS = 8


def message(step: int = 0, **values: torch.Tensor) -> list[Unread]:
    """What so many runs have saved in a step: rows of `values`, or 100 times the step and the number of the run."""
    values = values or {"h": torch.arange(float(RUNS)).view(RUNS, 1).repeat(1, 4) + 100 * step}
    tensors = Tensors()
    entries = [(name, "set", pack(value, tensors, together=True)) for name, value in values.items()]
    found = Together(list(range(1, RUNS + 1)), [0] * RUNS, [0] * RUNS, step, entries, 16)
    parts = frames.encode(Message(tensors.kinds, [], together=[found]), tensors.join())
    received: Any = frames.decode([bytearray(part) for part in parts])
    assert all(isinstance(frame, Unread) for frame in received)
    return received


def test_values_are_made_when_a_token_is_asked_for_them() -> None:
    unread = message()[3]
    held: Any = unread
    token = Token(7, "", 0, saves=held)
    assert unread.found is None
    assert token.saves["h"].tolist() == [3.0] * 4
    assert token.saves is token.saves
    assert token.saves["h"].untyped_storage().nbytes() == 16
    for other in (copy.deepcopy(token), pickle.loads(pickle.dumps(token))):
        assert type(other.saves) is dict
        assert other.saves["h"].tolist() == [3.0] * 4
    assert "'h': tensor([3., 3., 3., 3.])" in repr(token)


def test_threads_that_look_at_the_same_time_see_the_same_value() -> None:
    for _ in range(50):
        unread = message()[5]
        found: list[Any] = []
        start = threading.Barrier(4)

        def look(unread: Unread = unread, found: list[Any] = found, start: threading.Barrier = start) -> None:
            start.wait()
            found.append(unread.values()["h"])

        threads = [threading.Thread(target=look) for _ in range(3)]
        for thread in threads:
            thread.start()
        start.wait()
        unread.brought.part()
        for thread in threads:
            thread.join()
        assert len({id(value) for value in found}) == 1
        assert found[0].tolist() == [5.0] * 4


def test_a_message_is_parted_when_most_of_its_values_are_wanted_by_nobody() -> None:
    kept, last = Kept(), []
    received = message()
    kept.add(received[0].brought)
    several, brought = received[: RUNS // 2], weakref.ref(received[0].brought)
    one = received[0]
    del received
    gc.collect()

    def more() -> None:
        for step in range(1, 2 * GRACE):
            last[:] = message(step)
            kept.add(last[0].brought)

    more()
    assert not brought().parted  # half of its values may be looked at
    several.clear()
    more()
    assert brought().parted
    assert one.values()["h"].tolist() == [0.0] * 4
    more()
    assert len(kept) <= GRACE + 1
    del one
    gc.collect()
    assert brought() is None


def test_what_is_looked_at_does_not_keep_its_message() -> None:
    received = message()
    values = [unread.values() for unread in received[: RUNS // 2 + 1]]
    received[-1].brought.part()
    assert [value["h"][0].item() for value in values] == list(range(RUNS // 2 + 1))
    assert [unread.values()["h"][0].item() for unread in received] == list(range(RUNS))


def test_the_values_of_a_run_are_those_of_its_newest_step() -> None:
    ledger = Ledger()
    for step in range(3):
        ledger.file(message(step)[2])
    names = {"a": torch.arange(RUNS).float(), "h": torch.arange(RUNS).float() + 0.5}
    ledger.file(message(3, **names)[2])
    ledger.file(Frame(3, 4, [("h", "set", 7), ("l", "set", [1])], number=4))
    ledger.file(Frame(3, 5, [("l", "extend", [2])], number=5, done=True))
    assert ledger.values == {}
    saves = [ledger.let_out(0)[0], ledger.let_out(1)[0]]
    assert ledger.values["h"].tolist() == [102.0] * 4
    assert saves[0]["h"].tolist() == [2.0] * 4 if isinstance(saves[0], dict) else saves[0].found is None
    ledger.let_out(2)
    ledger.let_out(3)
    assert {name: float(value) for name, value in ledger.values.items()} == {"h": 2.5, "a": 2.0}
    ledger.let_out(4)
    ledger.let_out(5)
    assert {name: ledger.values[name] for name in "hl"} == {"h": 7, "l": [1, 2]}
    assert float(ledger.values["a"]) == 2.0


def test_a_name_that_later_steps_do_not_save_stays() -> None:
    ledger = Ledger()
    ledger.file(message(0)[2])
    ledger.file(message(1, a=torch.arange(RUNS).float())[2])
    ledger.let_out(0)
    ledger.let_out(1)
    assert float(ledger.values["a"]) == 2.0
    assert ledger.values["h"].tolist() == [2.0] * 4


def test_a_message_that_is_parted_keeps_nothing_of_runs_that_are_gone() -> None:
    received = message()
    one, brought = received[0], received[0].brought
    seen = [unread.values() for unread in received[5:]]
    brought.part()
    copied = [weakref.ref(values["h"]) for values in brought._taken.values()]
    assert len(copied) == 5
    del received
    assert [index for index, value in enumerate(copied) if value() is not None] == [0]
    assert one.values()["h"].tolist() == [0.0] * 4
    assert [values["h"][0].item() for values in seen] == [5.0, 6.0, 7.0]


def test_a_message_of_which_all_is_seen_or_gone_has_no_memory() -> None:
    received = message()
    seen, brought = received[:3], received[0].brought
    for unread in seen:
        unread.values()
    assert not brought.parted
    del received
    gc.collect()
    assert brought.parted
    assert [unread.values()["h"][0].item() for unread in seen] == [0.0, 1.0, 2.0]


def test_what_is_kept_is_weighed_against_the_whole_message() -> None:
    """Of which others may have had most: a run alone, or another crew."""
    tensors = Tensors()
    few = Together([1, 2], [0, 0], [0, 0], 0, [("h", "set", pack(torch.ones(2, 4), tensors, together=True))], 16)
    alone = Frame(3, 0, [("h", "set", pack(torch.zeros(1000), tensors))])
    parts = frames.encode(Message(tensors.kinds, [alone], together=[few]), tensors.join())
    received: Any = frames.decode([bytearray(part) for part in parts])
    first, second = (frame for frame in received if isinstance(frame, Unread))
    del received
    kept = Kept()
    kept.add(first.brought)
    kept.look()
    assert first.brought.parted
    assert second.values()["h"].tolist() == [1.0] * 4
    assert len(kept) == 0


def test_crews_of_one_message_are_weighed_together() -> None:
    tensors = Tensors()
    crews = [
        Together([2 * n + 1, 2 * n + 2], [0] * 2, [0] * 2, 0, [("h", "set", pack(rows, tensors, together=True))], 16)
        for n, rows in enumerate(torch.arange(24.0).view(3, 2, 4).unbind())
    ]
    parts = frames.encode(Message(tensors.kinds, [], together=crews), tensors.join())
    received: Any = frames.decode([bytearray(part) for part in parts])
    kept = Kept()
    kept.add(*{id(unread.brought): unread.brought for unread in received}.values())
    kept.look()
    assert not any(unread.brought.parted for unread in received)
    last = received.pop()
    del received
    gc.collect()
    kept.look()
    assert last.brought.parted
    assert last.values()["h"].tolist() == [20.0, 21.0, 22.0, 23.0]


def test_making_values_takes_no_lock_that_another_thread_may_wait_for() -> None:
    """The garbage collector may run then, and call what takes the lock of a run whose thread waits here."""
    mine, other = message()[:2]
    theirs: list[Any] = []
    original = unread_module.unpack

    def unpack(packed: Any, flats: Any, run: int) -> Any:
        if run == 0:
            thread = threading.Thread(target=lambda: theirs.append(other.values()), daemon=True)
            thread.start()
            thread.join(10)
            assert theirs, "another run waits for this one"
        return original(packed, flats, run)

    with mock.patch.object(unread_module, "unpack", unpack):
        assert mine.values()["h"].tolist() == [0.0] * 4
    assert theirs[0]["h"].tolist() == [1.0] * 4


@pytest.mark.parametrize("shape", [[4.0], [-1], ["x"], [2**63, 0], [5]])
@pytest.mark.parametrize("operation", ["set", "extend"])
def test_what_is_damaged_is_told_of_before_anybody_looks(shape: Any, operation: str) -> None:
    value = ["tensor", 0, 0, shape]
    entries = [("h", operation, value if operation == "set" else ["list", [value]])]
    found = Together(list(range(1, RUNS + 1)), [0] * RUNS, [0] * RUNS, 0, entries, 16)
    parts = frames.encode(Message([("float32", None)], [], together=[found]), [torch.zeros(RUNS * 4)])
    received = frames.decode([bytearray(part) for part in parts])
    assert len(received) == RUNS
    assert all(frame.damaged and not frame.entries for frame in received)


def test_a_copy_of_values_is_a_dict_that_leaves_them_alone() -> None:
    unread = message()[3]
    other = copy.copy(unread)
    assert type(other) is dict
    del other
    unread.brought.part()
    assert unread.values()["h"].tolist() == [3.0] * 4


def test_rows_of_a_crew_are_not_copied_for_a_run_that_goes_alone() -> None:
    tensors = Tensors()
    rows = torch.arange(float(RUNS * 4)).view(RUNS, 4)
    crew = Together(
        list(range(1, RUNS + 1)), [0] * RUNS, [0] * RUNS, 0, [("h", "set", pack(rows, tensors, together=True))], 16
    )
    alone = Frame(99, 0, [("h", "set", pack(torch.full((4,), -1.0), tensors))])
    parts = frames.encode(Message(tensors.kinds, [alone], together=[crew]), tensors.join())
    with mock.patch.object(torch, "unbind_copy", side_effect=AssertionError("all are copied")):
        received: Any = frames.decode([bytearray(part) for part in parts])
    assert received[0].entries[0][2].tolist() == [-1.0] * 4
    assert [unread.values()["h"].tolist() for unread in received[1:]] == rows.tolist()


@pytest.mark.parametrize("kind", ["bool", "complex64", "float8_e4m3fn", "bfloat16", "uint8", "int64"])
@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 0), (1, 3)])
def test_every_dtype_and_shape_comes_back(kind: str, shape: tuple[int, ...]) -> None:
    rows = torch.randint(0, 2, (RUNS, *shape)).to(getattr(torch, kind))
    received = message(h=rows, first=torch.ones(RUNS, 1, dtype=torch.uint8))
    for row, unread in zip(rows, received, strict=True):
        value = unread.values()["h"]
        assert (value.dtype, value.shape) == (row.dtype, row.shape)
        assert value.to(torch.complex64).tolist() == row.to(torch.complex64).tolist()


@pytest.mark.parametrize("finished", [True, False])
async def test_a_run_whose_last_values_cannot_be_made_ends_all_the_same(finished: bool) -> None:
    run = Run(Request({"prompt_token_ids": [1]}, None), block("h"))
    with mock.patch.object(unread_module, "unpack", side_effect=MemoryError):
        run.feed_output(output(7))
        run.feed_frame(message()[0])
        if finished:
            run.feed_output(output(8, finished=True))
            run.feed_frame(Frame(run.key, 1, done=True, number=1))
        else:
            run.cancel()
    assert run.settled
    with pytest.raises(ValuesLostError if finished else RunCancelledError):
        run.check()


def test_a_request_of_vllm_whose_last_values_cannot_be_made_fails_alone() -> None:
    foreign = Foreign([Installed(block("h"), None, False)], 1, str)
    collector, given = SimpleNamespace(output=None, put=None), []
    collector.put = given.append
    foreign.feed(collector, delta=True)
    with mock.patch.object(unread_module, "unpack", side_effect=MemoryError):
        unread = message()[0]
        unread.key = foreign.keys[0]
        foreign.feed_frame(unread)
        foreign.feed_frame(Frame(foreign.keys[0], 1, done=True, number=1))
        foreign.put(output(7, 8, finished=True))
    assert [type(each) for each in given] == [MemoryError]
    assert foreign.settled


def test_a_step_in_which_a_crew_saves_nothing_looks_at_nothing() -> None:
    ledger = Ledger()
    ledger.file(message()[0])
    empty: Any = frames.decode(
        frames.encode(Message([], [], together=[Together([1, 2], [0, 0], [0, 0], 1, [], 0)]), [])
    )
    ledger.file(empty[0])
    first = ledger.let_out(0)[0]
    assert ledger.let_out(1) == ({}, 0)
    assert isinstance(first, Unread)
    assert first.found is None
