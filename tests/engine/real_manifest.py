"""Run as a script: the manifest of a real engine on the checkpoint of the first argument, to the file of the second."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions travel to the workers below
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def described(worker: Any) -> bytes:
    from nnsight_async.tree.describe import describe

    return describe(worker.model_runner.model).encode()


def main(checkpoint: str, answer: Path) -> None:
    from vllm import LLM, SamplingParams

    from nnsight_async.tree.describe import describe
    from nnsight_async.tree.record import record

    ranks = int(os.environ.get("TP", "1"))
    engine = LLM(
        checkpoint,
        max_model_len=128,
        kv_cache_memory_bytes=64 << 20,
        enforce_eager=True,
        dtype="float32",
        tensor_parallel_size=ranks,
    )
    if ranks > 1:
        answer.write_bytes(engine.collective_rpc(described)[0])
        return
    model = engine.llm_engine.model_executor.driver_worker.worker.model_runner.model
    prompt, one = {"prompt_token_ids": [65, 66, 67]}, SamplingParams(max_tokens=1)
    calls = record(model, lambda: engine.generate(prompt, one, use_tqdm=False))
    answer.write_bytes(describe(model, calls=calls).encode())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
