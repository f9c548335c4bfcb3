"""vLLM's outputs, for clients that have no vLLM: the same names, and the values that came.

`Output` is its `RequestOutput`, `Completion` its `CompletionOutput`, `Logprob` its `Logprob` (vLLM 0.32, 0.33).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nnsight_async.serve.messages import Delta

Pairs = list[tuple[int, tuple[float, int | None, str | None]]]


@dataclass(slots=True)
class Logprob:
    """The natural logarithm of a token's probability, its rank from 1, and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class Completion:
    """What has been generated."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class Output:
    """The result of a request. `saves` are the final saved values by name."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[Completion]
    finished: bool
    num_cached_tokens: int | None = None
    saves: dict[str, Any] = field(default_factory=dict[str, Any])

    def add(self, delta: Output, aggregate: bool = True) -> None:
        """Append what came next."""
        mine, new = self.outputs[0], delta.outputs[0]
        mine.text += new.text
        mine.token_ids += new.token_ids
        if new.logprobs:
            mine.logprobs = [*(mine.logprobs or []), *new.logprobs]
        mine.cumulative_logprob = new.cumulative_logprob
        mine.finish_reason, mine.stop_reason = new.finish_reason, new.stop_reason
        self.finished = self.finished or delta.finished


def to_delta(output: Any, first: bool) -> Delta:
    """What is new in one of vLLM's outputs, `RequestOutputKind.DELTA`; what does not change goes with the first."""
    completion = output.outputs[0]
    return Delta(
        request_id=output.request_id,
        token_ids=list(completion.token_ids),
        text=completion.text,
        finished=output.finished,
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        cumulative_logprob=completion.cumulative_logprob,
        logprobs=[_pairs(found) for found in completion.logprobs] if completion.logprobs else None,
        prompt=output.prompt if first else None,
        prompt_token_ids=list(output.prompt_token_ids or ()) if first else None,
        prompt_logprobs=_all_pairs(output.prompt_logprobs) if first and output.prompt_logprobs else None,
        num_cached_tokens=output.num_cached_tokens if first else None,
    )


def of_delta(delta: Delta) -> Output:
    """The same, as the client has it."""
    completion = Completion(
        index=0,
        text=delta.text,
        token_ids=delta.token_ids,
        cumulative_logprob=delta.cumulative_logprob,
        logprobs=[_logprobs(pairs) for pairs in delta.logprobs] if delta.logprobs else None,
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
    )
    return Output(
        request_id=delta.request_id,
        prompt=delta.prompt,
        prompt_token_ids=delta.prompt_token_ids,
        prompt_logprobs=None
        if delta.prompt_logprobs is None
        else [None if pairs is None else _logprobs(pairs) for pairs in delta.prompt_logprobs],
        outputs=[completion],
        finished=delta.finished,
        num_cached_tokens=delta.num_cached_tokens,
    )


def _pairs(candidates: Mapping[int, Any]) -> Pairs:
    return [(token, (float(found.logprob), found.rank, found.decoded_token)) for token, found in candidates.items()]


def _all_pairs(candidates: Sequence[Mapping[int, Any] | None]) -> list[Pairs | None]:
    return [None if each is None else _pairs(each) for each in candidates]


def _logprobs(pairs: Pairs) -> dict[int, Logprob]:
    return {token: Logprob(*found) for token, found in pairs}
