from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from typing import Any

import torch

from nnsight_async import Token
from nnsight_async.runs import frames
from nnsight_async.runs.frames import Frame, Message, Together
from nnsight_async.runs.kept import GRACE, Kept
from nnsight_async.runs.ledger import Ledger
from nnsight_async.runs.packing import Tensors, pack
from nnsight_async.runs.unread import Unread

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
    assert received[-1].brought.dwindled
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
