"""Where vLLM's V1 model runner is entered (`vllm.v1.worker.gpu_model_runner`, checked on 0.32)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnsight_async.errors import UnsupportedError
from nnsight_async.worker.composition import Composition
from nnsight_async.worker.entries import around, require

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from nnsight_async.worker.blocks import Blocks

NAMES = (
    "_model_forward",
    "_sample",
    "_dummy_run",
    "query_start_loc.np",
    "input_batch.req_ids",
    "input_batch.num_computed_tokens_cpu",
    "model.compute_logits",
)


class V1Entry:
    """Reports the forward pass, the logits and the drawn tokens of a V1 runner to the blocks."""

    def __init__(self, runner: Any, blocks: Blocks, graphs: object = None) -> None:
        self._runner = runner
        self._blocks = blocks
        self._sampling = False
        around(runner, "_model_forward", self._forward)
        around(runner.model, "compute_logits", self._logits)
        around(runner, "_sample", self._sample)

    @staticmethod
    def graphs(runner: Any) -> None:
        """`UnsupportedError` if the runner replays graphs."""
        if not runner.vllm_config.model_config.enforce_eager:
            raise UnsupportedError(
                "blocks cannot look into graphs of vLLM's V1 runner, which is in use (VLLM_USE_V2_MODEL_RUNNER=0, or a "
                "feature that the V2 runner lacks): build the engine with enforce_eager=True and without taps"
            )

    @staticmethod
    def check(runner: Any) -> None:
        require(runner, NAMES)

    @staticmethod
    def dummy_forward(runner: Any) -> torch.Tensor:
        """One forward pass over a token of no request; returns hidden states."""
        hidden, _ = runner._dummy_run(1)
        return hidden

    def _forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def entered(*args: Any, **kwargs: Any) -> Any:
            self._sampling = True
            self._blocks.begin_step(self._composition(kwargs["positions"].shape[-1]))
            return forward(*args, **kwargs)

        return entered

    def _composition(self, rows: int) -> Composition:
        batch = self._runner.input_batch
        return Composition(batch.req_ids, self._runner.query_start_loc.np, batch.num_computed_tokens_cpu, rows)

    def _logits(self, compute_logits: Callable[..., Any]) -> Callable[..., Any]:
        def entered(*args: Any, **kwargs: Any) -> Any:
            if not self._sampling:  # the logprobs of a prompt
                return compute_logits(*args, **kwargs)
            self._sampling = False
            self._blocks.begin_sampling()
            return self._blocks.logits(compute_logits(*args, **kwargs))

        return entered

    def _sample(self, sample: Callable[..., Any]) -> Callable[..., Any]:
        def entered(*args: Any, **kwargs: Any) -> Any:
            sampled = sample(*args, **kwargs)
            sampled.sampled_token_ids = self._blocks.samples(sampled.sampled_token_ids)
            self._blocks.end_step()
            return sampled

        return entered
