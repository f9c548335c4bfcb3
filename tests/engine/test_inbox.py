"""The socket for saved values, without an engine."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import uvloop
import zmq

from nnsight_async.engine.home import make_home
from nnsight_async.engine.inbox import Inbox
from nnsight_async.runs import frames
from nnsight_async.runs.frames import MARK, Frame, Message, Together
from nnsight_async.runs.packing import Tensors, pack

WITHIN = 30.0
MANY = 300


@pytest.fixture
def home() -> Iterator[Path]:
    made = make_home()
    yield made
    shutil.rmtree(made, ignore_errors=True)


def send(address: str, *messages: list[Frame]) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as sender:
        sender.connect(address)
        for message in messages:
            sender.send_multipart(frames.encode(Message([], message, address), []))


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run])
def test_messages_come_in_their_order_and_the_loop_has_turns_between(run, home):
    got: list[int] = []
    turns: list[int] = []

    async def receive() -> None:
        inbox = Inbox(home, "model", lambda frame: got.append(frame.step), lambda: None)
        for burst in range(3):
            messages = [[Frame(1, step), Frame(2, step)] for step in range(MANY * burst, MANY * (burst + 1))]
            send(inbox.address, *messages)  # here: they all wait when the loop looks
            async with asyncio.timeout(WITHIN):
                while len(got) < 2 * MANY * (burst + 1):
                    turns.append(len(got))
                    await asyncio.sleep(0)
        assert inbox.counts() == {"messages": 3 * MANY, "frames": 6 * MANY, "bytes": inbox.bytes, "damaged": 0}
        await inbox.close()

    run(receive())
    assert got == [step for step in range(3 * MANY) for _ in range(2)]
    assert max(after - before for before, after in pairwise(turns)) <= 6  # three messages


async def test_values_that_are_kept_while_nothing_comes_do_not_keep_their_messages(home):
    got: list[Any] = []
    inbox = Inbox(home, "model", got.append, lambda: None)
    tensors = Tensors()
    crew = Together([1, 2, 3], [0] * 3, [0] * 3, 0, [("h", "set", pack(torch.arange(3.0), tensors, together=True))], 4)
    with zmq.Context() as context, context.socket(zmq.PUSH) as sender:
        sender.connect(inbox.address)
        sender.send_multipart(frames.encode(Message(tensors.kinds, [], inbox.address, [crew]), tensors.join()))
    async with asyncio.timeout(WITHIN):
        while len(got) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        del got[:2]
        while not got[0].brought.parted:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert got[0].values()["h"].item() == 2.0
    await inbox.close()


@pytest.mark.parametrize("closed", [False, True])
def test_a_socket_through_which_nothing_comes_is_replaced(closed, home, monkeypatch):
    monkeypatch.setattr("nnsight_async.engine.inbox.INTERVAL", 0.01)
    got: list[int] = []
    moved: list[str] = []

    async def receive() -> None:
        inbox = Inbox(home, "model", lambda frame: got.append(frame.step), lambda: moved.append(inbox.address))
        before = inbox.address
        if closed:
            inbox._socket.close()
        assert not await inbox.marked(inbox.next_mark)
        assert moved == [inbox.address] != [before]
        number = inbox.next_mark
        send(inbox.address, [Frame(1, 5)], [Frame(MARK, number)])
        async with asyncio.timeout(WITHIN):
            assert await inbox.marked(number)
        await inbox.close()

    uvloop.run(receive())
    assert got == [5]


def test_closing_while_it_is_replaced(home, monkeypatch):
    monkeypatch.setattr("nnsight_async.engine.inbox.INTERVAL", 0.01)

    async def receive() -> None:
        inbox = Inbox(home, "model", lambda frame: None, lambda: None)
        waiting = asyncio.ensure_future(inbox.marked(inbox.next_mark))
        await asyncio.sleep(0)
        await inbox.close()
        assert not await asyncio.wait_for(waiting, WITHIN)

    uvloop.run(receive())
