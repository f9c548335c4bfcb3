"""Where vLLM's V2 model runner is entered (`vllm.v1.worker.gpu.model_runner`, checked on 0.32 and 0.33)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnsight_async.worker.composition import Composition
from nnsight_async.worker.entries import around, require

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from nnsight_async.worker.blocks import Blocks

NAMES = ("prepare_inputs", "sample", "_dummy_run", "model.compute_logits")


class V2Entry:
    """Reports the forward pass, the logits and the drawn tokens of a V2 runner to the blocks."""

    def __init__(self, runner: Any, blocks: Blocks) -> None:
        self._blocks = blocks
        self._sampling = False
        around(runner, "prepare_inputs", self._inputs)
        around(runner.model, "compute_logits", self._logits)
        around(runner, "sample", self._sample)

    @staticmethod
    def check(runner: Any) -> None:
        require(runner, NAMES)

    @staticmethod
    def dummy_forward(runner: Any) -> torch.Tensor:
        """One forward pass over a token of no request; returns hidden states."""
        hidden, _ = runner._dummy_run(1, skip_attn=True, is_profile=True)
        return hidden

    def _inputs(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        def entered(*args: Any, **kwargs: Any) -> Any:
            batch = prepare(*args, **kwargs)
            rows = batch.num_tokens_after_padding
            step = Composition(batch.req_ids, batch.query_start_loc_np, batch.num_computed_tokens_np, rows)
            self._blocks.begin_step(step)
            return batch

        return entered

    def _logits(self, compute_logits: Callable[..., Any]) -> Callable[..., Any]:
        def entered(*args: Any, **kwargs: Any) -> Any:
            logits = compute_logits(*args, **kwargs)
            return self._blocks.logits(logits) if self._sampling else logits

        return entered

    def _sample(self, sample: Callable[..., Any]) -> Callable[..., Any]:
        def entered(*args: Any, **kwargs: Any) -> Any:
            self._sampling = True
            self._blocks.begin_sampling()
            try:
                sampled, *rest = sample(*args, **kwargs)
            finally:
                self._sampling = False
            sampled.sampled_token_ids = self._blocks.samples(sampled.sampled_token_ids)
            self._blocks.end_step()
            return sampled, *rest

        return entered
