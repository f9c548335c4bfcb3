"""`python -m benchmarks.client`: host time of the client without vLLM's engine.

The worker of `benchmarks.turns` sends what blocks saved, and outputs of vLLM that were made before are put where
`AsyncLLM` would put them. Two threads take that in as in an application: the engine's, and a caller's with a loop that
reads all streams. In the line `plain` one loop reads vLLM's own collectors, as `AsyncLLM.generate` does. What is
measured is CPU time of these threads; vLLM's share in the making of its outputs is in no line.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import torch
import uvloop

from benchmarks.blocks import probe
from benchmarks.columns import Work
from benchmarks.report import markdown
from benchmarks.turns import Worker
from nnsight_async.capture.function import from_function
from nnsight_async.engine import engine as engines
from nnsight_async.engine.engine import Engine, Limits
from nnsight_async.runs.request import Request
from nnsight_async.runs.run import Run
from nnsight_async.runs.stream import Stream
from nnsight_async.tree.manifest import Manifest

WARM = 20
WORKS: tuple[Work, ...] = ("plain", "idle", "one", "every")
LIMITS = Limits(sys.maxsize, 600.0, sys.maxsize, "fail", 1 << 30)


class StandIn:
    """Of `AsyncLLM`, what our engine asks of it. Its outputs are put by hand."""

    def __init__(self, manifest: Manifest) -> None:
        self.output_handler: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.engine_core = None
        self.collectors: list[Any] = []
        self._answers = {"nnsight_describe": manifest.encode()}

    async def add_request(self, request: str, *_: Any, **__: Any) -> Any:
        self.collectors.append(_collector(request))
        return self.collectors[-1]

    async def abort(self, request: str, *, internal: bool) -> None:
        """Nothing goes on here."""

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return [self._answers.get(method)]

    async def taken_in(self, requests: int) -> list[Any]:
        """Where the outputs of so many requests are put, once they have come."""
        while len(self.collectors) < requests:  # noqa: ASYNC110 -- not measured
            await asyncio.sleep(0.01)
        return self.collectors

    def shutdown(self) -> None:
        self.output_handler.cancel()


class Readers:
    """A loop in a thread of its own that reads streams."""

    def __init__(self, *, look: bool) -> None:
        """`look`: ask each token for its values."""
        self._look = look
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self._step = threading.Event()
        self._missing = 0
        self._reading: list[Any] = []

    def read(self, streams: Sequence[Callable[[], AsyncIterator[Any]]]) -> None:
        self._count = self._missing = len(streams)
        self._reading = [asyncio.run_coroutine_threadsafe(self._read(stream), self.loop) for stream in streams]

    def wait(self) -> None:
        """Until each reader has one more token."""
        self._step.wait(60)
        self._step.clear()

    def finish(self) -> None:
        """Until all streams have ended."""
        for reading in self._reading:
            reading.result(60)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _read(self, stream: Callable[[], AsyncIterator[Any]]) -> None:
        async for token in stream():
            if self._look:
                token.saves  # noqa: B018 -- values are made when they are asked for
            self._missing -= 1
            if not self._missing:
                self._missing = self._count
                self._step.set()


def measure(work: Work, requests: int, steps: int, *, look: bool = False) -> dict[str, float]:
    """CPU microseconds per request and step, by thread."""
    outputs = [[_output(last=step == WARM + steps - 1) for _ in range(requests)] for step in range(WARM + steps)]
    with ExitStack() as stack, torch.inference_mode():
        readers = Readers(look=look and work != "plain")
        stack.callback(readers.close)
        step, threads = (_plain if work == "plain" else _ours)(stack, work, requests, readers)
        for number in range(WARM):
            step(number, outputs[number])
            readers.wait()
        gc.collect()
        gc.freeze()
        before = _seconds(threads)
        for number in range(WARM, WARM + steps):
            step(number, outputs[number])
            readers.wait()
        spent = [after - first for after, first in zip(_seconds(threads), before, strict=True)]
        gc.unfreeze()
        readers.finish()
    share = 1e6 / requests / steps
    *engine, caller = (seconds * share for seconds in spent)
    return {"both": sum(engine) + caller, "engine's thread": sum(engine), "caller's thread": caller}


_Step = Callable[[int, list[Any]], None]
_Loops = Sequence[asyncio.AbstractEventLoop]


def _plain(stack: ExitStack, work: Work, requests: int, readers: Readers) -> tuple[_Step, _Loops]:
    collectors = [_collector(str(number)) for number in range(requests)]
    readers.read([partial(_generate, collector) for collector in collectors])

    def step(number: int, outputs: list[Any]) -> None:
        readers.loop.call_soon_threadsafe(_put, collectors, outputs)

    return step, [readers.loop]


def _ours(stack: ExitStack, work: Work, requests: int, readers: Readers) -> tuple[_Step, _Loops]:
    from vllm import SamplingParams

    worker = Worker()
    stack.callback(worker.close)
    stack.enter_context(mock.patch.object(engines, "start_vllm", partial(_stand_in, worker.manifest)))
    engine = Engine({"model": "client", "enforce_eager": True}, LIMITS, {})
    stack.callback(engine.close)
    engine.start()
    worker.send_to(engine._inbox.address)
    block = None if work == "idle" else from_function(probe(worker.view, work))
    runs = [Run(Request({"prompt_token_ids": [1]}, SamplingParams()), block) for _ in range(requests)]
    names = worker.arrive(work, [run.key for run in runs]) if block is not None else []
    for run in runs:
        engine.submit(run)
    readers.read([partial(Stream, run) for run in runs])
    stand_in: Any = engine.llm
    collectors = engine.call(stand_in.taken_in(requests)).result()

    def step(number: int, outputs: list[Any]) -> None:
        if names:
            worker.step(names, number)
        engine._loop.call_soon_threadsafe(_put, collectors, outputs)
        if names and outputs[0].finished:
            worker.leave(names)

    return step, [engine._loop, readers.loop]


def _stand_in(manifest: Manifest, *_: Any) -> StandIn:
    return StandIn(manifest)


async def _generate(collector: Any) -> AsyncIterator[Any]:
    """What `AsyncLLM.generate` does with a request that it has taken in."""
    finished = False
    while not finished:
        output = collector.get_nowait() or await collector.get()
        finished = output.finished
        yield output


def _put(collectors: list[Any], outputs: list[Any]) -> None:
    for collector, output in zip(collectors, outputs, strict=True):
        collector.put(output)


def _collector(request: str) -> Any:
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.output_processor import RequestOutputCollector

    return RequestOutputCollector(RequestOutputKind.DELTA, request)


def _output(*, last: bool) -> Any:
    from vllm import CompletionOutput, RequestOutput

    completion = CompletionOutput(0, " word", [1], None, None, finish_reason="length" if last else None)
    return RequestOutput("request", None, [1], None, [completion], last)


def _seconds(loops: _Loops) -> list[float]:
    """CPU time that the threads of the loops have had."""

    async def seconds() -> float:
        return time.thread_time()

    return [asyncio.run_coroutine_threadsafe(seconds(), loop).result() for loop in loops]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.client")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--look", action="store_true", help="have the reader ask for the values of each token")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[Work, list[dict[str, float]]] = {work: [] for work in WORKS}
    for _ in range(options.repeats):  # in turns: a machine that slows down slows all of them
        for work in WORKS:
            found[work].append(measure(work, options.requests, options.steps, look=options.look))
    rows: list[list[str]] = []
    for work, repeats in found.items():
        least, most = (pick(repeats, key=lambda one: one["both"]) for pick in (min, max))
        figures = [*least.values(), most["both"]]
        rows.append([str(options.requests), work, *(f"{number:.1f}" for number in figures)])
    header = ["requests", "column", *next(iter(found.values()))[0], "slowest repeat"]
    print(f"CPU microseconds per request and step; the fastest of {options.repeats} repeats\n")
    print(markdown(header, rows))


if __name__ == "__main__":
    main()
