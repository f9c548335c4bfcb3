"""The outputs of one request, from vLLM straight to its run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnsight_async.engine.sampling import refusals

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.engine.async_llm import AsyncLLM

    from nnsight_async.runs.run import Run


class Feed:
    """A request on vLLM whose outputs go to a run as they are made.

    `AsyncLLM.generate` merges the outputs of steps that follow each other quickly, and the text of each token is lost.
    What `AsyncLLM.add_request` returns is where every single one is put (`RequestOutputCollector`, vLLM 0.32, 0.33).
    """

    def __init__(self, run: Run, fail: Callable[[Exception], None]) -> None:
        self._run = run
        self._fail = fail
        self._llm: Any = None
        self._id: str | None = None
        self._over = False

    async def open(self, llm: AsyncLLM) -> None:
        """Hand the request to vLLM; `ValueError` for one that it refuses."""
        request, self._llm = self._run.request, llm
        with refusals():
            collector: Any = await type(llm).add_request(  # not the one that is for requests from elsewhere
                llm,
                f"nnsight-{self._run.key}",
                request.prompt,
                request.params,
                lora_request=request.lora,
                trace_headers=request.trace_headers,
                priority=request.priority,
            )
        self._id = collector.request_id
        early, collector.output = collector.output, None
        collector.put = self._put
        if early is not None:
            self._put(early)

    async def close(self) -> bool:
        """Abort the request, if it still goes; returns whether it did."""
        if self._id is None or self._over:
            return False
        await self._llm.abort(self._id, internal=True)
        return True

    def _put(self, output: Any) -> None:
        """Called by the task that serves all requests: nothing may be raised here."""
        try:
            if isinstance(output, Exception):
                self._over = True
                raise output
            self._over = output.finished
            self._run.feed_output(output)
        except Exception as error:
            self._fail(error)
