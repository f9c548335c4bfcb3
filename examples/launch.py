"""What the examples share: their command line, and an engine to run on."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

QUIET = {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
ENGINE: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 256 << 20}


def launch(example: Callable[[Any], Awaitable[object]], description: str | None) -> None:
    """Run `example` on the model of the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", help="a Llama-like checkpoint: a folder, or a repository on the hub")
    given = parser.parse_args().model
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    asyncio.run(_on_engine(example, given or default_checkpoint()))


def default_checkpoint() -> str:
    """The demo's model, where it is installed; otherwise one of random weights, which makes no sense but runs."""
    from nnsight_async.demo.smollm import smollm_checkpoint
    from nnsight_async.testing import tiny_checkpoint

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        return smollm_checkpoint()
    except ModuleNotFoundError as error:
        print(f"random weights, because {error}")
        return tiny_checkpoint("llama")


async def _on_engine(example: Callable[[Any], Awaitable[object]], checkpoint: str) -> None:
    from nnsight_async import VLLM

    print(f"starting an engine for {checkpoint} ...", flush=True)
    async with VLLM(checkpoint, mode="async", **ENGINE) as model:
        await example(model)
