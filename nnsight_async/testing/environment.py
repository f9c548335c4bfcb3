"""Environment variables for vLLM in tests."""

from __future__ import annotations

import os
from pathlib import Path

TRITON_CPU = Path(__file__).parent / "triton_cpu"


def quiet_environment() -> dict[str, str]:
    """Variables for an engine that neither phones home nor fetches, and computes a tiny model on one thread.

    They count only if they are set before torch and vLLM are imported.
    """
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",  # more threads than cores among engine and worker: 85 ms a token instead of 2
        # The worker in the engine's process, which vLLM (0.32) otherwise does not allow on a CPU, for the sake of its
        # threads: one process less to start.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }


def v2_runner_environment() -> dict[str, str]:
    """Variables for a subprocess whose vLLM uses the V2 model runner on the CPU.

    vLLM picks V1 there, because V2's kernels are Triton's; `triton_cpu` on `PYTHONPATH` has them interpreted.
    """
    search_path = [str(TRITON_CPU), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(search_path),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
