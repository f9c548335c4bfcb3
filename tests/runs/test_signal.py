"""Waiting for a change, and being told of it, from any thread or loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from nnsight_async.runs.signal import Signal

WITHIN = 30.0


class Counter:
    """Something that changes."""

    def __init__(self) -> None:
        self.value = 0
        self.changed = Signal()

    def rise(self) -> None:
        self.value += 1
        self.changed.notify()

    def above(self, value: int) -> Callable[[], bool]:
        return lambda: self.value > value

    async def watch(self, to: int) -> list[int]:
        """Every value that is seen on the way."""
        seen = [self.value]
        while seen[-1] < to:
            await self.changed.until(self.above(seen[-1]))
            seen.append(self.value)
        return seen[1:]


def in_threads(*calls: Callable[[], object]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN)
    assert not any(thread.is_alive() for thread in threads)


def test_nobody_sleeps_through_a_change() -> None:
    counters = [Counter() for _ in range(8)]
    ends: list[int] = []

    async def watch() -> None:
        async with asyncio.timeout(WITHIN):
            found = await asyncio.gather(*(counter.watch(300) for counter in counters for _ in range(3)))
        ends.extend(seen[-1] for seen in found)

    def block() -> None:
        for value in range(300):
            assert counters[0].changed.block_until(counters[0].above(value), WITHIN)
        ends.append(counters[0].value)

    def rise() -> None:
        for _ in range(300):
            for counter in counters:
                counter.rise()

    in_threads(lambda: asyncio.run(watch()), lambda: asyncio.run(watch()), block, rise)
    assert ends == [300] * (2 * 24 + 1)


def test_what_two_threads_tell_at_once() -> None:
    signal, woken = Signal(), [0] * 2000
    for number in range(len(woken)):
        signal.once(lambda number=number: woken.__setitem__(number, woken[number] + 1))
    in_threads(signal.notify, signal.notify)
    assert woken == [1] * len(woken)


async def test_those_who_wait_in_one_loop_share_a_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = [Counter() for _ in range(20)]
    watching = [asyncio.ensure_future(counter.watch(2)) for counter in counters]
    await asyncio.sleep(0)
    loop, calls = asyncio.get_running_loop(), []
    plain = loop.call_soon_threadsafe

    def counted(callback: Any, *args: Any) -> Any:
        calls.append(callback)
        return plain(callback, *args)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "call_soon_threadsafe", counted)
        for step in (1, 2):
            for counter in counters:
                counter.rise()
            for _ in range(5):  # the waiters see it, and wait again
                await asyncio.sleep(0)
            assert len(calls) == step
    assert await asyncio.gather(*watching) == [[1, 2]] * len(counters)


async def test_one_who_gave_up_takes_nothing_from_the_others() -> None:
    counter = Counter()
    gone, stays = (asyncio.ensure_future(counter.watch(1)) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    counter.rise()
    assert await asyncio.wait_for(stays, WITHIN) == [1]
    assert gone.cancelled()


def test_a_loop_that_has_been_closed_and_the_next_one_of_its_thread() -> None:
    counter = Counter()
    waiting: list[Any] = []

    async def leave() -> None:
        waiting.append(counter.changed.until(counter.above(0)))
        waiting[0].send(None)  # it waits for a future of this loop

    async def wait() -> list[int]:
        watching = asyncio.ensure_future(counter.watch(counter.value + 1))
        await asyncio.sleep(0)
        counter.rise()
        return await asyncio.wait_for(watching, WITHIN)

    asyncio.run(leave())
    assert asyncio.run(wait()) == [1]
    assert not counter.changed.block_until(counter.above(1), timeout=0)
    waiting[0].close()
    assert asyncio.run(wait()) == [2]


def test_who_is_told_may_tell_again() -> None:
    """As a finaliser does, in the middle of anything."""
    signal = Signal()
    told: list[str] = []

    def again() -> None:
        told.append("first")
        signal.once(lambda: told.append("later"))
        signal.notify()

    signal.once(again)
    signal.once(lambda: told.append("second"))
    signal.notify()
    assert told == ["first", "second", "later"]
