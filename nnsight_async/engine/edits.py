"""Which edits an engine has, and which of them a request runs."""

from __future__ import annotations

import asyncio
import difflib
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from nnsight_async.runs import failures
from nnsight_async.runs.edit import Installed

if TYPE_CHECKING:
    from nnsight_async.engine.constants import Constants

Ask = Callable[..., Awaitable[Any]]
"""Calls a method of the worker."""


class Edits:
    """The edits of an engine, in the order in which they were installed. Any thread may ask which there are.

    A request is told its edits when it is submitted, so this side alone decides who runs which.
    """

    def __init__(self, ask: Ask, constants: Constants, block_seconds: float) -> None:
        self._ask = ask
        self._block_seconds = block_seconds
        self._constants = constants
        self._changing = threading.Lock()
        self._ending = asyncio.Lock()
        self._installed: dict[int, Installed] = {}
        self._using: dict[int, AsyncExitStack] = {}
        """What to undo when an edit ends: the worker has it, and its constants."""

    @property
    def installed(self) -> tuple[Installed, ...]:
        with self._changing:
            return tuple(self._installed.values())

    def chosen(self, names: Sequence[str] | None) -> tuple[Installed, ...]:
        """All edits for None; else those named and every one without a name. `ValueError` for an unknown name."""
        installed = self.installed
        if names is None or not installed:
            wanted = names or ()
        else:
            wanted = names
            installed = tuple(edit for edit in installed if edit.name is None or edit.name in names)
        known = {edit.name for edit in installed}
        unknown = [name for name in wanted if name not in known]
        if unknown:
            raise ValueError(self._unknown(unknown[0]))
        return installed

    async def install(self, edit: Installed) -> None:
        """Have requests that are submitted from here on run `edit`; raises what loading it in the worker does."""
        self._check_name(edit.name)
        using = AsyncExitStack()
        try:
            await using.enter_async_context(self._constants.on_hand(edit.block.constants))
            using.push_async_callback(self._ask, "nnsight_clear", [edit.number])
            installed = (edit.number, edit.block.payload, edit.rowwise, self._block_seconds)
            failure: bytes | None = await self._ask("nnsight_install", *installed)
            if failure is not None:
                raise failures.unpack(failure)
            with self._changing:
                self._check_name(edit.name)
                self._installed[edit.number] = edit
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
            with self._changing:
                chosen = [
                    number for number in (self._installed if numbers is None else numbers) if number in self._installed
                ]
                for number in chosen:
                    del self._installed[number]
            for number in chosen:
                await self._using.pop(number).aclose()

    def _check_name(self, name: str | None) -> None:
        if name is not None and any(edit.name == name for edit in self._installed.values()):
            raise ValueError(f"an edit named {name!r} is installed; clear it first, or give this one another name")

    def _unknown(self, name: str) -> str:
        names = [edit.name for edit in self.installed if edit.name is not None]
        near = difflib.get_close_matches(str(name), names, 1)
        instead = f"did you mean {near[0]!r}?" if near else f"there are {names}" if names else "none has a name"
        return f"edits={name!r}: no edit of this engine has that name; {instead}"
