"""`python -m benchmarks.served`: streams with a saved value per token, from a server and in its process.

The client is a process of its own, as it is in use: it takes time of the same cores here.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import uvloop

from benchmarks.models import NAMES, engine_arguments

HIGHEST = 500
Probe = Callable[[Any, Any], object]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.served", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help=f"a checkpoint, or one of {', '.join(NAMES)}")
    parser.add_argument("--requests", default="1,8,32", help="how many at once")
    parser.add_argument("--steps", type=int, default=32, help="tokens that each request generates")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each prompt")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each, in turns")
    options = parser.parse_args()
    arguments = engine_arguments(options.model)
    counts = [int(count) for count in options.requests.split(",")]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as client:
        uvloop.run(_compare(arguments, counts, options, client))


async def _compare(
    arguments: dict[str, Any], counts: list[int], options: argparse.Namespace, client: ProcessPoolExecutor
) -> None:
    from nnsight_async import VLLM
    from nnsight_async.serve.server import Server

    repo = arguments.pop("model")
    most = max(counts)
    model = VLLM(
        repo, mode="async", dispatch=True, dtype="auto", max_model_len=-(-(options.prompt + options.steps) // 64) * 64,
        max_num_seqs=most, max_num_batched_tokens=max(2048, most * options.prompt), kv_cache_memory_bytes=256 << 20,
        disable_log_stats=True, enable_chunked_prefill=False, **arguments,
    )  # fmt: skip
    print(f"{options.model}, {options.prompt} prompt tokens, {options.steps} steps, {options.repeats} repeats\n")
    print("| requests | in process, ms per step | served | overhead | overhead of the whole |")
    print("|---:|---:|---:|---:|---:|")
    loop = asyncio.get_running_loop()
    with Server(model) as server:
        for count in counts:
            here: list[tuple[float, float]] = []
            there: list[tuple[float, float]] = []
            for repeat in range(options.repeats + 1):
                local = await drive(model, count, options.prompt, options.steps)
                served = await loop.run_in_executor(
                    client, drive_served, repo, server.url, count, options.prompt, options.steps
                )
                if repeat:  # the first is not counted
                    here.append(local)
                    there.append(served)
            (step, wall), (step_there, wall_there) = (
                map(statistics.median, zip(*each, strict=True)) for each in (here, there)
            )
            print(
                f"| {count} | {1000 * step:.2f} | {1000 * step_there:.2f} | {step_there / step - 1:.1%} | "
                f"{wall_there / wall - 1:.1%} |",
                flush=True,
            )
    await model.aclose()


_models: dict[str, Any] = {}
"""Of the client's process."""
_loop: list[asyncio.AbstractEventLoop] = []


def drive_served(repo: str, url: str, count: int, prompt: int, steps: int) -> tuple[float, float]:
    """The same in a process without an engine."""
    from nnsight_async import VLLM

    if url not in _models:
        _models[url] = VLLM(repo, mode="async", serve=url, dispatch=True)
        _loop.append(uvloop.new_event_loop())
    return _loop[0].run_until_complete(drive(_models[url], count, prompt, steps))


async def drive(model: Any, count: int, prompt: int, steps: int) -> tuple[float, float]:
    """Seconds per step, the median of the requests, and seconds from the first to the last."""
    layers = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    middle = layers[len(layers) // 2]

    def probe(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            tracer.save(middle.resid_post[-1], "hidden")

    async def one(number: int) -> list[float]:
        ids = [5 + (number * 31 + at * 7) % HIGHEST for at in range(prompt)]
        arrivals: list[float] = []
        async with model.run(ids, probe, max_tokens=steps, temperature=0.0, ignore_eos=True) as run:
            async for token in run.stream():
                assert token.saves["hidden"].ndim == 1
                arrivals.append(time.monotonic())
        return arrivals

    start = time.monotonic()
    arrivals = await asyncio.gather(*(one(number) for number in range(count)))
    wall = time.monotonic() - start
    return statistics.median((times[-1] - times[0]) / (steps - 1) for times in arrivals), wall


if __name__ == "__main__":
    sys.exit(main())
