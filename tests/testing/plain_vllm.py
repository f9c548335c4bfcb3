"""Run as a script: greedy tokens of plain vLLM for each prompt, as JSON in the file of the last argument."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams


def main(checkpoint: str, prompts: list[list[int]], answer: Path) -> None:
    llm = LLM(checkpoint, max_model_len=256, kv_cache_memory_bytes=64 << 20, enforce_eager=True, dtype="float32")
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    answer.write_text(json.dumps({"runner": type(runner).__module__, "tokens": tokens}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))
