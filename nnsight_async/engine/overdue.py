"""Runs whose saved values do not come."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from nnsight_async.errors import NNsightError, ValuesLostError
from nnsight_async.runs.ledger import lost

if TYPE_CHECKING:
    from nnsight_async.engine.inbox import Inbox
    from nnsight_async.runs.ledger import Ledger

    Awaited = tuple["Waiting", int, Ledger]

INTERVAL = 1.0
"""Seconds for which a run waits for a frame before it is looked into."""


class Waiting(Protocol):
    """A request that waits for frames of its runs."""

    def awaited(self) -> list[tuple[int, Ledger]]: ...
    def fail(self, error: BaseException) -> None: ...


class Overdue:
    """Finds out which values are lost, and which are only slow: a block may take its time after the last token.

    The worker says what it has reported, and sends a mark after that. Messages keep their order, so what has not come
    before the mark will not come. Most of what is lost is missed sooner, by the next frame of the run.
    """

    def __init__(self, runs: Mapping[int, Waiting], inbox: Inbox, ask: Callable[..., Awaitable[Any]]) -> None:
        self._runs = runs
        self._inbox = inbox
        self._ask = ask
        self._watching: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """Look after the runs that there are, for as long as there are any."""
        if self._watching is None or self._watching.done():
            self._watching = asyncio.ensure_future(self._watch())

    async def send_here(self) -> None:
        """Tell the worker where the inbox is now; if that fails, so will what is asked next."""
        with suppress(Exception):
            await self._ask("nnsight_mark", self._inbox.address, self._inbox.next_mark)

    async def _watch(self) -> None:
        waiting: dict[int, int] = {}
        while self._runs:
            await asyncio.sleep(INTERVAL)
            before = waiting
            awaited = list(self._awaited())
            waiting = {key: sum(ledger.frames) for _, key, ledger in awaited}
            overdue = [one for one in awaited if before.get(one[1]) == waiting[one[1]]]
            if overdue:
                await self._look_into(overdue)

    def _awaited(self) -> Iterator[Awaited]:
        for run in dict.fromkeys(self._runs.values()):
            for key, ledger in run.awaited():
                yield run, key, ledger

    async def _look_into(self, overdue: Sequence[Awaited]) -> None:
        sent: defaultdict[int, dict[int, int]] = defaultdict(dict)
        try:
            number = self._inbox.next_mark
            for key, part, frames in await self._ask("nnsight_mark", self._inbox.address, number):
                sent[key][part] = frames
        except Exception as error:
            for run, _, _ in overdue:
                run.fail(_typed(error))
            return
        await self._inbox.marked(number)
        for run, key, ledger in overdue:
            if key in dict(run.awaited()) and ledger.misses(sent[key]):
                run.fail(lost(ledger.missing_step))


def _typed(error: Exception) -> Exception:
    if isinstance(error, NNsightError):
        return error
    stands_in = ValuesLostError(f"saved values did not come, and the worker does not say what became of them: {error}")
    stands_in.__cause__ = error
    return stands_in
