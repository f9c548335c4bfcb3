"""`python -m nnsight_async.demo`: stream an answer, and beside each token what a late layer would have said."""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import TYPE_CHECKING, Any

from nnsight_async.demo.display import GUESSES, heading, row
from nnsight_async.demo.smollm import smollm_checkpoint

if TYPE_CHECKING:
    from collections.abc import Sequence


# bfloat16 rounds enough to change what so small a model answers.
ENGINE: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 256 << 20}

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


async def stream_answer(checkpoint: str, question: str, layer: int | None, max_tokens: int) -> None:
    from nnsight_async import VLLM

    async with VLLM(checkpoint, mode="async", **ENGINE) as model:
        depth = len(model.model.layers) * 9 // 10 if layer is None else layer
        chat = [{"role": "user", "content": question}]

        async with model.trace(chat, max_tokens=max_tokens, temperature=0.0) as tracer:
            for _ in tracer.iter[:]:
                hidden, residual = model.model.layers[depth].output
                stream = (hidden + residual)[-1:]
                logits = model.logits_processor(model.lm_head, model.model.norm(stream))
                tracer.save(logits.topk(GUESSES).indices[0], "top")

        print(heading(question, depth), flush=True)
        async for token in tracer.stream():
            guesses = [model.tokenizer.decode([guess]) for guess in token.saves["top"].tolist()]
            print(row(token.text, guesses), flush=True)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m nnsight_async.demo", description=__doc__)
    parser.add_argument(
        "--model", help="folder of a Llama-like checkpoint (default: SmolLM2-135M-Instruct, from a package)"
    )
    parser.add_argument("--prompt", default="What is the capital of France?")
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--layer", type=int, help="the layer to read (default: nine tenths of the way up)")
    return parser.parse_args(given)


def main() -> None:
    options = arguments()
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    print("preparing the weights (the first time takes half a minute) ...", flush=True)
    checkpoint = options.model or smollm_checkpoint()
    print("starting the engine (another half minute) ...", flush=True)
    asyncio.run(stream_answer(checkpoint, options.prompt, options.layer, options.max_tokens))


if __name__ == "__main__":
    main()
