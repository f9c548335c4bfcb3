"""Which edits an engine has, and which of them a request runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from nnsight_async.runs import failures
from nnsight_async.runs.chosen import InstalledEdits

if TYPE_CHECKING:
    from nnsight_async.engine.constants import Constants
    from nnsight_async.engine.op_sites import Sites
    from nnsight_async.runs.edit import Installed

Ask = Callable[..., Awaitable[Any]]
"""Calls a method of the worker."""


class Edits(InstalledEdits):
    """The edits of an engine.

    A request is told its edits when it is submitted, so this side alone decides who runs which.
    """

    def __init__(self, ask: Ask, constants: Constants, block_seconds: float, sites: Sites) -> None:
        super().__init__()
        self._sites = sites
        self._ask = ask
        self._block_seconds = block_seconds
        self._constants = constants
        self._ending = asyncio.Lock()
        self._using: dict[int, AsyncExitStack] = {}
        """What to undo when an edit ends: the worker has it, and its constants."""

    async def install(self, edit: Installed) -> None:
        """Have requests that are submitted from here on run `edit`; raises what loading it in the worker does."""
        self.check_name(edit.name)
        self._sites.check(edit.ops)
        using = AsyncExitStack()
        try:
            await using.enter_async_context(self._constants.on_hand(edit.block.constants))
            using.push_async_callback(self._ask, "nnsight_clear", [edit.number])
            installed = (edit.number, edit.block.payload, edit.rowwise, self._block_seconds)
            failure: bytes | None = await self._ask("nnsight_install", *installed)
            if failure is not None:
                raise failures.unpack(failure)
            self.add(edit)
        except BaseException:
            await using.aclose()
            raise
        self._using[edit.number] = using

    async def clear(self, numbers: Iterable[int] | None = None) -> None:
        """End edits (None: all of them), for requests that go on too; those that have been cleared are left out.

        Who is cancelled in it waits no longer, but the edits end. Whoever clears what another is clearing waits too.
        """
        await asyncio.shield(self._end(numbers))

    async def _end(self, numbers: Iterable[int] | None) -> None:
        async with self._ending:
            for number in self.remove(numbers):
                await self._using.pop(number).aclose()
