"""Where vLLM's V2 model runner is entered (`vllm.v1.worker.gpu.model_runner`, checked on 0.32 and 0.33)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnsight_async.worker.composition import NOBODY, Composition
from nnsight_async.worker.entries import around, require
from nnsight_async.worker.graphs import Graphs

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from nnsight_async.worker.blocks import Blocks

NAMES = (
    "gather_batch_req_state",
    "prepare_inputs",
    "sample",
    "_dummy_run",
    "req_states.num_computed_tokens_np",
    "model.compute_logits",
)


class V2Entry:
    """Reports the forward pass, the logits and the drawn tokens of a V2 runner to the blocks."""

    def __init__(self, runner: Any, blocks: Blocks, graphs: Graphs | None = None) -> None:
        self._runner = runner
        self._blocks = blocks
        self._graphs = graphs
        self._sampling = False
        around(runner, "gather_batch_req_state", self._gathered)
        around(runner, "prepare_inputs", self._inputs)
        around(runner.model, "compute_logits", self._logits)
        around(runner, "sample", self._sample)

    @staticmethod
    def graphs(runner: Any) -> Graphs | None:
        """The runner's graphs; None if it replays none, and compiles nothing."""
        return Graphs.of(runner)

    @staticmethod
    def check(runner: Any) -> None:
        require(runner, NAMES)

    @staticmethod
    def dummy_forward(runner: Any) -> torch.Tensor:
        """One forward pass over a token of no request; returns hidden states."""
        hidden, _ = runner._dummy_run(1, skip_attn=True, is_profile=True)
        return hidden

    def _gathered(self, gather: Callable[..., Any]) -> Callable[..., Any]:
        """Blocks begin a step before the runner decides how it is run."""

        def entered(*args: Any, **kwargs: Any) -> Any:
            state, uniform = gather(*args, **kwargs)
            if state is not None:  # the requests of a step, not a pass that measures
                self._blocks.begin_step(NOBODY if self._blocks.idle else self._composition(state))
            if self._graphs is not None:
                self._graphs.choose()
            return state, uniform

        return entered

    def _composition(self, state: Any) -> Composition:
        starts = [0, *state.num_scheduled_tokens.cumsum().tolist()]
        computed = self._runner.req_states.num_computed_tokens_np[state.idx_mapping_np]
        return Composition(state.req_ids, starts, computed, state.num_tokens)

    def _inputs(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        def entered(*args: Any, **kwargs: Any) -> Any:
            batch = prepare(*args, **kwargs)
            self._blocks.pad(batch.num_tokens_after_padding)
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
