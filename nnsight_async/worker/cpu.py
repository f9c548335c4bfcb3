"""Our worker on the CPU."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from nnsight_async.worker.worker import BlockWorker


class CPUBlockWorker(BlockWorker, CPUWorker):
    """vLLM's CPU worker with blocks."""
