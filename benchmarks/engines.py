"""The engines that are compared, all driven alike: every request at once, every token consumed as it comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from itertools import count
from typing import Any, Protocol

from benchmarks import blocks
from benchmarks.clock import WorkerClock
from benchmarks.columns import EngineKind, Work
from benchmarks.stopwatch import WorkerStopwatch

_numbers = count()

Arrivals = list[float]


class OurExtension(WorkerClock, WorkerStopwatch):
    """What vLLM mixes into our worker."""


class Driven(Protocol):
    """An engine in this process."""

    def tokens(self, work: Work, prompt: list[int], steps: int) -> AsyncIterator[object]: ...
    async def rpc(self, method: str) -> Any: ...
    async def close(self) -> None: ...


async def drive(
    engine: Driven, work: Work, prompts: list[list[int]], steps: int
) -> tuple[dict[str, Any], list[Arrivals]]:
    """Run all prompts together; seconds from first to last, seconds per step between tokens, and tokens. Then when each
    token came, by prompt."""
    start = time.monotonic()
    arrivals = await asyncio.gather(*(_consume(engine.tokens(work, prompt, steps)) for prompt in prompts))
    wall = time.monotonic() - start
    gaps = sorted((times[-1] - times[0]) / (steps - 1) for times in arrivals)
    return {"wall": wall, "step": gaps[len(gaps) // 2], "tokens": len(prompts) * steps}, arrivals


async def _consume(tokens: AsyncIterator[object]) -> Arrivals:
    return [time.monotonic() async for _ in tokens]


class Plain:
    """vLLM's AsyncLLM as it is, on the loop of its caller."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        extension = _name(WorkerClock)
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments, worker_extension_cls=extension))

    async def tokens(self, work: Work, prompt: list[int], steps: int) -> AsyncIterator[object]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(**_sampling(steps), output_kind=RequestOutputKind.DELTA)
        async for output in self._llm.generate({"prompt_token_ids": prompt}, params, f"bench-{next(_numbers)}"):
            for _ in output.outputs[0].token_ids:
                yield output

    async def rpc(self, method: str) -> Any:
        if not hasattr(WorkerClock, method):  # nothing of ours is there to be measured
            return None
        return (await self._llm.collective_rpc(method))[0]

    async def close(self) -> None:
        self._llm.shutdown()


class Ours:
    """Our engine: `VLLM(mode="async")`."""

    def __init__(self, arguments: dict[str, Any], kind: EngineKind = "ours") -> None:
        from nnsight_async import VLLM

        repo = arguments.pop("model")
        if kind == "stepwise":
            arguments["enforce_eager"] = False
        elif kind == "ops":
            arguments["op_sites"] = [blocks.layers_of(repo)]
        elif kind != "ours":
            arguments["taps"] = blocks.taps(repo, every=kind == "taps")
        arguments["worker_extension_cls"] = _name(OurExtension)
        self._model = VLLM(repo, mode="async", dispatch=True, **arguments)
        self._probes: dict[Work, blocks.Probe] = {}
        self._shared: dict[Work, list[Any]] = {}

    async def tokens(self, work: Work, prompt: list[int], steps: int) -> AsyncIterator[object]:
        async with self._run(work, prompt, _sampling(steps)) as run:
            async for token in run.stream():
                assert work in ("idle", "edit", *blocks.OPERATIONS) or token.saves
                yield token

    def _run(self, work: Work, prompt: list[int], sampling: dict[str, Any]) -> Any:
        if work in blocks.OPERATIONS:
            sampling = {**sampling, "ops": self._ops(work)}
        elif work != "idle":
            if work not in self._probes:
                self._probes[work] = blocks.probe(self._model, work)
            return self._model.run(prompt, self._probes[work], **sampling)
        from nnsight_async.runs.handle import ProbeRun

        # A plain request of the public API is not streamed; this is one that is.
        request = self._model._request(prompt, sampling, "benchmark")
        return ProbeRun(self._model, request, None)  # type: ignore[arg-type]

    def _ops(self, work: Work) -> list[Any]:
        if work == "ops-distinct":
            return blocks.operations(self._model, work)
        if work not in self._shared:
            self._shared[work] = blocks.operations(self._model, work)
        return self._shared[work]

    async def rpc(self, method: str) -> Any:
        """Call a method of the worker."""
        engine = self._model._engine
        assert engine is not None
        return (await asyncio.wrap_future(engine.call(engine.llm.collective_rpc(method))))[0]

    async def close(self) -> None:
        await self._model.aclose()


def _name(extension: type) -> str:
    """What vLLM's `worker_extension_cls` is: its methods are on the worker, and do nothing until they are called."""
    return f"{extension.__module__}.{extension.__qualname__}"


def _sampling(steps: int) -> dict[str, Any]:
    return {"max_tokens": steps, "temperature": 0.0, "ignore_eos": True}
