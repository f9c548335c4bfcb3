"""LoRA on the CPU: requests without an adapter, beside others that have one."""

from __future__ import annotations

from functools import wraps
from typing import Any

from nnsight_async.worker.entries import require


def leave_the_rest_alone() -> None:
    """Have the rows of requests without an adapter stay as they are.

    vLLM's kernels in PyTorch (`lora_ops`, 0.32) give such rows the index -1, and index the adapters with it: where any
    request of a step has an adapter, those without one get the last. What is multiplied by an adapter's first matrix
    is set to zero for them, and so is what its second matrix makes of it.
    """
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    modules: tuple[Any, ...] = (lora_ops, punica_cpu)
    for module in modules:
        require(module, ["bgmv_shrink"])
    original = modules[0].bgmv_shrink
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def bgmv_shrink(inputs: Any, adapters: Any, output: Any, indices: Any, scaling: float = 1.0) -> None:
        original(inputs, adapters, output, indices, scaling)
        output[indices < 0] = 0

    for module in modules:
        module.bgmv_shrink = bgmv_shrink
