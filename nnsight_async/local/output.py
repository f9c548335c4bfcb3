"""What a run of a local model comes to, by the names that vLLM gives it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnsight_async.local.sampling import Logprob


@dataclass(slots=True)
class Completion:
    """The tokens that were drawn for a prompt."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, delta: Completion) -> None:
        """Append what came in one more step."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        if self.logprobs is not None and delta.logprobs is not None:
            self.logprobs += delta.logprobs
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + (delta.cumulative_logprob or 0.0)


@dataclass(slots=True)
class GenerationOutput:
    """A prompt, what was drawn for it, and what its blocks saved."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    finished: bool = False
    saves: dict[str, Any] = field(default_factory=dict[str, Any])

    def add(self, delta: GenerationOutput, aggregate: bool = True) -> None:
        """Take in what came in one more step."""
        self.outputs[0].add(delta.outputs[0])
