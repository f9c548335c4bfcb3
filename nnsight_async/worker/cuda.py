"""Our worker on CUDA devices."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from nnsight_async.worker.worker import BlockWorker


class CUDABlockWorker(BlockWorker, Worker):
    """vLLM's GPU worker with blocks."""
