"""A process with one engine, driven by JSON lines: requests on standard input, replies on the old standard output."""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import traceback
from typing import IO, Any

import psutil
import uvloop

from benchmarks.clientwatch import ClientStopwatch
from benchmarks.clock import delays
from benchmarks.engines import Driven, Ours, Plain, drive

HIGHEST = 500  # ids of prompts; every tokenizer has as many


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints must not end up among the replies
    try:
        uvloop.run(_serve(sys.stdin, replies))
    except Exception:
        _say(replies, {"error": traceback.format_exc()})


async def _serve(commands: IO[str], replies: IO[str]) -> None:
    setup = json.loads(commands.readline())
    kind, arguments = setup["kind"], setup["arguments"]
    engine: Driven = Plain(arguments) if kind in ("plain", "graphs") else Ours(arguments, kind)
    gc.collect()
    gc.freeze()  # in all engines' clients alike: a full collection takes a third of a second
    try:
        _say(replies, _versions())
        # Nothing runs between a reply and the next command, so the loop may stand still.
        for line in commands:
            _say(replies, await _measure(engine, json.loads(line)))
    finally:
        await engine.close()


async def _measure(engine: Driven, command: dict[str, Any]) -> dict[str, Any]:
    prompts = _prompts(command["requests"], command["prompt"])
    if command.get("latency"):
        return await _measure_latency(engine, command, prompts)
    if not command.get("profile"):
        timing, _ = await drive(engine, command["work"], prompts, command["steps"])
        return timing
    await engine.rpc("stopwatch_start")
    client, before = ClientStopwatch(), _cpu()
    try:
        timing, _ = await drive(engine, command["work"], prompts, command["steps"])
    finally:
        client.stop()
    after = _cpu()
    worker = await engine.rpc("stopwatch_stop")
    cpu = {name: after[name] - before[name] for name in after}
    return {**timing, "worker": worker or {}, "client": client.seconds, "cpu": cpu}


async def _measure_latency(engine: Driven, command: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
    await engine.rpc("clock_start")
    timing, arrivals = await drive(engine, command["work"], prompts, command["steps"])
    ended = await engine.rpc("clock_stop")
    return {**timing, "delays": delays(prompts, arrivals, ended)}


def _prompts(requests: int, length: int) -> list[list[int]]:
    draw = random.Random(requests)
    return [[draw.randrange(5, HIGHEST) for _ in range(length)] for _ in range(requests)]


def _cpu() -> dict[str, float]:
    """CPU seconds so far of this process, and of all that it has started."""
    here = psutil.Process()
    children = [child.cpu_times() for child in here.children(recursive=True)]
    own = here.cpu_times()
    return {"client": own.user + own.system, "engine": sum(times.user + times.system for times in children)}


def _versions() -> dict[str, str]:
    import torch
    import vllm

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"vllm": vllm.__version__, "torch": torch.__version__, "device": device}


def _say(replies: IO[str], message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")


if __name__ == "__main__":
    main()
