"""One block over many prompts, a bounded number of them at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tqdm import tqdm

from nnsight_async.runs.body import check_awaiting_allowed, check_blocking_allowed
from nnsight_async.runs.prompts import NOTHING, AsyncPrompts, length, prompts_of
from nnsight_async.runs.window import MapResult, Window

if TYPE_CHECKING:
    from nnsight_async.runs.handle import Launcher
    from nnsight_async.runs.job import Job

FORM = "for result in model.map(...)"


class Map:
    """Iterate over it, with `for` or `async for`, to get a `MapResult` for each prompt.

    Prompts are taken one by one as there is room for them. Leaving the loop early (`break`, an exception, cancellation)
    aborts what is in flight; where the object is kept in a variable, `with`, `async with` or `close()` say when.
    """

    def __init__(
        self,
        launcher: Launcher,
        prompts: Any,
        plan: Callable[[Any], Job],
        window: Window,
        *,
        asynchronous: bool,
        progress: bool = False,
        return_errors: bool = False,
    ) -> None:
        self._window = window
        self._prompts = prompts_of(prompts, window.changed.notify)
        self._launcher = launcher
        self._plan = plan
        self._asynchronous = asynchronous
        self._return_errors = return_errors
        # disable=None: only on a terminal
        self._bar = tqdm(total=length(prompts), unit="prompt", disable=None if progress else True)

    def close(self) -> None:
        """Abort what is in flight; the iteration is over."""
        self._window.cancel()
        self._prompts.close()
        self._bar.close()

    async def aclose(self) -> None:
        """`close`, for `contextlib.aclosing`."""
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_bar"):
            self.close()

    # -- in a thread -----------------------------------------------------------------------------------------------

    def __iter__(self) -> Self:
        check_blocking_allowed(self._asynchronous, FORM)
        if isinstance(self._prompts, AsyncPrompts):
            raise TypeError(f"prompts of an async iterable can only be waited for: write `async {FORM}`")
        return self

    def __next__(self) -> MapResult:
        try:
            while not self._is_done():
                for job in self._refill():
                    self._launcher.launch(job)
                if self._window.ready:
                    return self._hand_out()
                self._window.changed.block_until(self._has_news)
        except BaseException:
            self.close()
            raise
        self._bar.close()
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- in an event loop ------------------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        check_awaiting_allowed(self._asynchronous, FORM)
        return self

    async def __anext__(self) -> MapResult:
        try:
            await asyncio.sleep(0)  # results may wait already, and others want the loop, the source of prompts first
            while not self._is_done():
                for job in self._refill():
                    await self._launcher.alaunch(job)
                if self._window.ready:
                    return self._hand_out()
                await self._window.changed.until(self._has_news)
        except BaseException:
            self.close()
            raise
        self._bar.close()
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- both ------------------------------------------------------------------------------------------------------

    def _refill(self) -> Iterator[Job]:
        """Runs to start now."""
        while self._may_take():
            prompt = self._prompts.take()
            if prompt is NOTHING:
                continue
            try:
                job = self._plan(prompt)
            except Exception as error:
                self._window.add_failed(prompt, error)
            else:
                self._window.add(prompt, job)
                yield job

    def _hand_out(self) -> MapResult:
        result = self._window.take()
        if result.error is not None and not self._return_errors:
            result.error.add_note(f"this was prompt {result.index}, counted from 0")
            raise result.error
        self._bar.update()
        return result

    def _may_take(self) -> bool:
        return self._window.has_room and self._prompts.open

    def _has_news(self) -> bool:
        return self._window.ready or self._may_take() or self._is_done()

    def _is_done(self) -> bool:
        return self._prompts.exhausted and self._window.empty
