"""vLLM's outputs of one request: the tokens that each brings, and all of them as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnsight_async.runs.token import Token

Drawn = tuple[int, str, float | None, str | None]
"""A token that waits for its step: id, text, logprob, finish reason."""


class Deltas:
    """Joins the outputs. Until the last has come, `output` may lack ids and text.

    vLLM's own `RequestOutput.add` takes longer than all else that is done for a token: only outputs that bring more
    than ids and text are joined by it, one by one.
    """

    def __init__(self) -> None:
        self.output: Any = None
        self._ids: list[int] = []
        self._texts: list[str] = []

    def add(self, delta: Any) -> list[Drawn]:
        """Take an output in; returns its tokens."""
        completion = delta.outputs[0]
        if self.output is None:
            self.output = delta
        elif delta.finished or _has_more(completion):
            self._join()
            self.output.add(delta, aggregate=True)
            self.output.finished = delta.finished
        else:
            self._ids += completion.token_ids
            self._texts.append(completion.text)
        return _drawn(completion)

    def cut(self, tokens: list[Token]) -> None:
        """Only these count of what vLLM has drawn."""
        completion = self.output.outputs[0]
        completion.token_ids = [token.id for token in tokens]
        completion.text = "".join(token.text for token in tokens)
        if completion.logprobs:
            completion.logprobs = completion.logprobs[: len(tokens)]
            completion.cumulative_logprob = sum(token.logprob or 0.0 for token in tokens)
        completion.finish_reason = "stop"
        self.output.finished = True

    def _join(self) -> None:
        if not self._texts:
            return
        completion = self.output.outputs[0]
        completion.token_ids = [*completion.token_ids, *self._ids]
        completion.text += "".join(self._texts)
        self._ids, self._texts = [], []


def _has_more(completion: Any) -> bool:
    """Whether something was asked for with each token (vLLM 0.32, 0.33)."""
    return completion.logprobs is not None or getattr(completion, "sampling_mask", None) is not None


def _drawn(completion: Any) -> list[Drawn]:
    """What a delta brings: one token, unless vLLM drew several in one step, whose text then stands on the last."""
    ids: list[int] = completion.token_ids
    if not ids:
        return []
    if len(ids) == 1 and not completion.logprobs:
        return [(ids[0], completion.text, None, completion.finish_reason)]
    logprobs: list[float | None] = [None] * len(ids)
    if completion.logprobs:
        logprobs = [_logprob(found, number) for found, number in zip(completion.logprobs, ids, strict=False)]
    *earlier, last = zip(ids, logprobs, strict=True)
    bare: list[Drawn] = [(number, "", logprob, None) for number, logprob in earlier]
    return [*bare, (last[0], completion.text, last[1], completion.finish_reason)]


def _logprob(candidates: dict[int, Any], token: int) -> float | None:
    found = candidates.get(token)
    return None if found is None else float(found.logprob)
