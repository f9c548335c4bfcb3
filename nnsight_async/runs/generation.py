"""Plain requests, without a block: any number of prompts, submitted as the engine can take them."""

from __future__ import annotations

from collections.abc import Coroutine, Generator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from nnsight_async.runs.group import planned
from nnsight_async.runs.map import Map
from nnsight_async.runs.trace import Trace, Tracer
from nnsight_async.runs.window import Window

if TYPE_CHECKING:
    from nnsight_async.runs.handle import Launcher
    from nnsight_async.runs.request import Request

IN_FLIGHT = 1024
"""Plain requests that are with vLLM at a time: no fewer than it schedules by default (0.33); more is only memory."""


class Generation(Trace, Coroutine[Any, Any, list[Any]]):
    """What `model.generate(...)` is on an async model: a coroutine for the outputs, or a trace to enter.

    It is a coroutine by its methods, so that `asyncio.create_task` takes it, and begins only when it is awaited.
    """

    def __init__(
        self, launcher: Launcher, requests: Sequence[Request], asynchronous: bool, *, carries: bool = False
    ) -> None:
        super().__init__(launcher, requests[0], asynchronous, carries=carries)
        self._requests = requests
        self._coroutine: Coroutine[Any, Any, list[Any]] | None = None

    def result(self) -> list[Any]:
        """The outputs, waited for in this thread."""
        return [result.output for result in self._plain()]

    def __await__(self) -> Generator[Any, Any, list[Any]]:
        return self._begun().__await__()

    def send(self, value: Any) -> Any:
        return self._begun().send(value)

    def throw(self, *error: Any) -> Any:
        return self._begun().throw(*error)

    def close(self) -> None:
        if self._coroutine is not None:
            self._coroutine.close()

    def _begun(self) -> Coroutine[Any, Any, list[Any]]:
        if self._coroutine is None:
            self._coroutine = self._outputs()
        return self._coroutine

    async def _outputs(self) -> list[Any]:
        async with self._plain() as results:
            return [result.output async for result in results]

    def _plain(self) -> Map:
        window = Window(IN_FLIGHT, ordered=True)
        return Map(
            self._launcher,
            self._requests,
            lambda request: planned(request, None),
            window,
            asynchronous=self._asynchronous,
        )

    def _enter(self, frame: FrameType) -> Tracer:
        if len(self._requests) > 1:
            raise ValueError(
                "`with model.generate(prompt)` takes one prompt; write `with model.generate() as tracer:`, and in its "
                "body `with tracer.invoke(prompt):` for each"
            )
        return super()._enter(frame)
