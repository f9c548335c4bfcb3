"""What the client has the worker hold, against the worker's own store."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
import torch

from nnsight_async.capture.constants import Constant, constant
from nnsight_async.engine import constants as engine_constants
from nnsight_async.engine.constants import Constants
from nnsight_async.errors import ShippingError
from nnsight_async.worker.constants import Constants as Store

MB = 1 << 20


class Worker:
    """The store, and what it was asked."""

    def __init__(self) -> None:
        self.store = Store(torch.device("cpu"))
        self.sent: list[int] = []
        self.failing: str | None = None

    async def ask(self, method: str, *args: Any) -> Any:
        await asyncio.sleep(0)
        if method == "nnsight_drop":
            self.store.drop(*args)
        elif self.failing:
            return self.failing
        else:
            digest, size, start, piece = args
            self.store.receive(digest, size, start, bytes(piece))
            if start == 0:
                self.sent.append(size)
        return None

    def holds(self, *wanted: Constant) -> bool:
        mine = [torch.equal(self.store.own(one.digest), one.content) for one in wanted]
        return all(mine) and self.store.count == len(wanted)


@pytest.fixture
def worker() -> Worker:
    return Worker()


def filled(value: int, size: int = MB) -> Constant:
    return constant(torch.full((size,), value, dtype=torch.uint8))


async def used(constants: Constants, *wanted: Constant) -> None:
    async with constants.on_hand(wanted):
        pass


async def test_a_constant_is_sent_once_and_in_pieces(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_constants, "PIECE", 300_000)
    constants, one = Constants(worker.ask, 4 * MB), constant(torch.arange(3 * MB // 8).view(torch.uint8))

    for _ in range(3):
        async with constants.on_hand([one]):
            assert worker.holds(one)

    assert worker.sent == [3 * MB]
    assert worker.holds(one)


async def test_runs_at_the_same_time_send_it_once(worker: Worker) -> None:
    constants, one, other = Constants(worker.ask, 4 * MB), filled(1), filled(2)

    await asyncio.gather(*(used(constants, one, other) for _ in range(20)))

    assert len(worker.sent) == 2
    assert worker.holds(one, other)


async def test_the_least_recently_used_goes_first_and_is_sent_again(worker: Worker) -> None:
    constants, (a, b, c) = Constants(worker.ask, 2 * MB), (filled(number) for number in range(3))
    await used(constants, a)
    await used(constants, b)
    await used(constants, a)

    await used(constants, c)
    assert worker.holds(a, c)

    async with constants.on_hand([b]):
        assert worker.holds(b, c)
    assert len(worker.sent) == 4


async def test_what_a_run_uses_stays_past_the_limit_and_goes_after_it(worker: Worker) -> None:
    constants, (a, b, c) = Constants(worker.ask, 2 * MB), (filled(number) for number in range(3))

    async with AsyncExitStack() as runs:
        for one in (a, b, c, a):
            await runs.enter_async_context(constants.on_hand([one]))
        assert worker.holds(a, b, c)

    assert worker.store.bytes == 2 * MB
    assert len(worker.sent) == 3


async def test_one_that_is_larger_than_the_limit_is_held_while_it_is_used(worker: Worker) -> None:
    constants, large = Constants(worker.ask, MB), filled(1, 3 * MB)

    for _ in range(2):
        async with constants.on_hand([large]):
            assert worker.holds(large)
        assert worker.store.count == 0

    assert worker.sent == [3 * MB] * 2


async def test_a_run_that_fails_lets_go_of_its_constants(worker: Worker) -> None:
    constants, one, other = Constants(worker.ask, MB), filled(1), filled(2)

    with pytest.raises(KeyError):
        async with constants.on_hand([one]):
            raise KeyError
    await used(constants, other)

    assert worker.holds(other)


async def test_no_room_in_the_worker_is_an_error_of_the_run_and_the_next_one_tries_again(worker: Worker) -> None:
    constants, one = Constants(worker.ask, 4 * MB), filled(1)
    worker.failing = "OutOfMemoryError: no room"

    with pytest.raises(ShippingError, match=r"1,048,576 bytes.*no room"):
        await used(constants, one)
    worker.failing = None
    await used(constants, one)

    assert worker.holds(one)


async def test_any_order_of_runs_finds_its_constants(worker: Worker) -> None:
    generator = torch.Generator().manual_seed(5)
    constants, all_of_them = Constants(worker.ask, 3 * MB), [filled(number) for number in range(6)]

    async def run() -> None:
        chosen = [all_of_them[int(number)] for number in torch.randperm(6, generator=generator)[:2]]
        for _ in range(int(torch.randint(4, (), generator=generator))):
            await asyncio.sleep(0)
        async with constants.on_hand(chosen):
            for _ in range(int(torch.randint(4, (), generator=generator))):
                await asyncio.sleep(0)
            assert all(torch.equal(worker.store.own(one.digest), one.content) for one in chosen)

    for _ in range(20):
        await asyncio.gather(*(run() for _ in range(5)))

    assert worker.store.bytes <= 3 * MB
