"""One run in a batch: its prompt, its blocks, and the tokens drawn for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnsight_async.local.output import Completion, GenerationOutput
from nnsight_async.local.sampling import Draw, Sampling, logprobs
from nnsight_async.local.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from nnsight_async.interleave.block import BlockRun
    from nnsight_async.local.prompts import Prompt
    from nnsight_async.runs.run import Run


class Member:
    """A run from its first step to its last."""

    def __init__(
        self, run: Run, prompt: Prompt, blocks: Sequence[BlockRun], tokenizer: Any, ends: frozenset[int], device: Any
    ) -> None:
        params: Sampling = run.request.params
        self.run = run
        self.prompt = prompt
        self.blocks = blocks
        self.draw = Draw(params, device)
        self.last: int = 0
        self.drawn = 0
        self.over = False
        self._params = params
        self._text = Text(tokenizer, tuple(params.stop))
        self._ends: frozenset[int] = frozenset() if params.ignore_eos else ends
        self._stops = frozenset(params.stop_token_ids) - self._ends

    @property
    def graph(self) -> bool:
        """Whether gradients are to be had."""
        asked: bool | None = self._params.gradients
        return any(block.takes_gradients for block in self.blocks) if asked is None else asked

    @property
    def max_tokens(self) -> int:
        return self._params.max_tokens

    def take(self, token: int, logits: torch.Tensor) -> None:
        """A token was drawn from `logits`, `[vocab]`: tell the run."""
        self.last = token
        self.drawn += 1
        text = self._text.add(token)
        stopped = self._text.stopped(text)
        reason = self._reason(token, stopped is not None)
        self.over = reason is not None
        completion = Completion(0, text if stopped is None else stopped[1], [token], finish_reason=reason)
        if reason == "stop":
            completion.stop_reason = stopped[0] if stopped is not None else token if token in self._stops else None
        if self._params.logprobs is not None:
            found = logprobs(logits, token, self._params.logprobs)
            completion.logprobs, completion.cumulative_logprob = [found], found[token].logprob
        self.run.feed_output(GenerationOutput(self.prompt.text, list(self.prompt.ids), [completion], self.over))

    def _reason(self, token: int, stopped: bool) -> str | None:
        if self.drawn >= self._params.min_tokens and (stopped or token in self._ends or token in self._stops):
            return "stop"
        return "length" if self.drawn >= self._params.max_tokens else None
