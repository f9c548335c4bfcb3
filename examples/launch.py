"""What the examples share: their command line, and an engine to run on."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import os
from collections.abc import Awaitable, Callable
from typing import Any

Example = Callable[..., Awaitable[object]]
LocalExample = Callable[..., object]

QUIET = {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
ENGINE: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory_bytes": 256 << 20}


def launch(example: Example, description: str | None) -> None:
    """Run `example(model, ...)` on the model of the command line; its keywords with a default are options."""
    options = vars(parser(example, description).parse_args())
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    checkpoint, dtype = options.pop("model"), options.pop("dtype")
    asyncio.run(_on_engine(example, checkpoint or default_checkpoint(), dtype, options))


def launch_local(example: LocalExample, description: str | None, checkpoint: Callable[[], str] | None = None) -> None:
    """`launch`, for one that takes a model of transformers: without `--model`, that which `checkpoint` makes."""
    from nnsight_async import TransformersModel

    options = vars(parser(example, description).parse_args())
    given, dtype = options.pop("model"), options.pop("dtype")
    with TransformersModel(given or (checkpoint or default_checkpoint)(), dtype=dtype) as model:
        example(model, **options)


def parser(example: LocalExample, description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    made.add_argument("--model", help="a Llama-like checkpoint: a folder, or a repository on the hub")
    made.add_argument("--dtype", default="float32", help="what the engine computes in; 'auto': as in the checkpoint")
    for name, parameter in inspect.signature(example).parameters.items():
        default = parameter.default
        if default is not parameter.empty:
            many = isinstance(default, tuple)
            kind, nargs = (type(default[0]), "+") if many else (type(default), None)
            made.add_argument(f"--{name.replace('_', '-')}", type=kind, nargs=nargs, default=default, help=" ")
    return made


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


async def _on_engine(example: Example, checkpoint: str, dtype: str, options: dict[str, Any]) -> None:
    from nnsight_async import VLLM

    print(f"starting an engine for {checkpoint} ...", flush=True)
    async with VLLM(checkpoint, mode="async", dtype=dtype, **ENGINE) as model:
        await example(model, **options)
