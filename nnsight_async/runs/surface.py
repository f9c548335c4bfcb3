"""What callers find on every model, whatever runs it: edits, and the ends of its life."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from nnsight_async.runs.body import loop_is_running
from nnsight_async.runs.edit import Edit, EditBody, Installed

if TYPE_CHECKING:
    from nnsight_async.capture.block import Block

Mode = Literal["sync", "async"]


class Surface(ABC):
    """The part of a model's surface that leans on a few methods of its own."""

    mode: Mode

    @abstractmethod
    def close(self) -> None:
        """Let go of all that the model holds; closing again does nothing."""

    @abstractmethod
    def owners(self) -> tuple[object, ...]:
        """What the modules belong to that blocks on this model may use."""

    @abstractmethod
    def install(self, edit: Installed) -> None:
        """Install an edit, building first what it runs on if need be."""

    @abstractmethod
    async def ainstall(self, edit: Installed) -> None:
        """`install`, without blocking the event loop."""

    @abstractmethod
    def _installed(self) -> Sequence[Installed]:
        """The edits that there are."""

    @abstractmethod
    def _clear(self, numbers: list[int] | None) -> Future[None] | None:
        """End edits, or all; None where there are none."""

    async def aclose(self) -> None:
        """`close`, without blocking the event loop."""
        await asyncio.to_thread(self.close)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def edits(self) -> tuple[Edit, ...]:
        """The edits that are installed, in the order in which they run."""
        return tuple(Edit(self).attach(each) for each in self._installed())

    def clear_edits(self) -> Any:
        """End all edits, for the requests that go on too; in async mode, `await model.clear_edits()`."""
        return self.uninstall(None)

    def uninstall(self, edits: Iterable[Installed] | None) -> Any:
        """End edits (None: all); on a model of mode "async", to be awaited where an event loop runs."""
        done = self._clear(None if edits is None else [edit.number for edit in edits])
        if done is None:
            done = Future()
            done.set_result(None)
        return asyncio.wrap_future(done) if self.mode == "async" and loop_is_running() else done.result()

    def _edit(self, block: Block | None, name: str | None, *, rowwise: bool = False) -> Any:
        """What `edit()` returns: something to enter, or, for a block, what has been installed."""
        if block is None:
            return EditBody(self, name, rowwise=rowwise, asynchronous=self.mode == "async")
        return self._put(Installed(block, name, rowwise))

    def _put(self, installed: Installed) -> Any:
        """Install it; an `Edit`, or what waits for one."""
        if self.mode == "async":
            return self._aedit(installed)
        self.install(installed)
        return Edit(self).attach(installed)

    async def _aedit(self, installed: Installed) -> Edit:
        await self.ainstall(installed)
        return Edit(self).attach(installed)
