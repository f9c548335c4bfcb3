"""What is asked of a run beside its prompt, from keyword arguments."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

import torch

from nnsight_async.engine.sampling import edit_names
from nnsight_async.engine.settings import check_names
from nnsight_async.errors import UnsupportedError
from nnsight_async.runs.keywords import ALIASES, OTHERS, PLAIN, named
from nnsight_async.runs.request import Request

if TYPE_CHECKING:
    from collections.abc import Sequence

ON_VLLM = ("lora_request", "priority", "ops", "serve", "api_key")


@dataclass(slots=True)
class Sampling:
    """How tokens are drawn, in vLLM's terms. A temperature of 0 takes the likeliest.

    `gradients`: whether the forward passes record a graph; None: if the text of a block says that it takes gradients.
    """

    max_tokens: int = 1
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    gradients: bool | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_tokens", 1), ("min_tokens", 0), ("n", 1), ("top_k", -1), ("logprobs", 0)):
            value: object = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise TypeError(f"{name}={value!r}: a whole number is expected")
            if value is not None and value < least:
                raise ValueError(f"{name}={value}: it is {least} or more")
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)):
                raise TypeError(f"{name}={value!r}: a number is expected")
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature}: it is 0 or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: it is above 0 and at most 1")
        self.stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


KNOWN = tuple(field.name for field in fields(Sampling))
ELSEWHERE = (PLAIN | OTHERS).difference(KNOWN)


def settings(given: Mapping[str, Any], defaults: Mapping[str, Any], what: str) -> Request:
    """A request without a prompt; `TypeError` for an unknown name, `ValueError` for a bad value."""
    own = named(given, what)
    for name in ON_VLLM:
        if own.pop(name, None) is not None:
            instead = "; change layer.resid_post in a block here" if name == "ops" else ""
            raise UnsupportedError(f"{name}= is for a model on vLLM{instead}")
    edits = edit_names(own.pop("edits", None))
    if others := own.keys() & ELSEWHERE:
        raise UnsupportedError(
            f"{what} got {min(others)}=, which vLLM knows and a local model does not: it takes {', '.join(KNOWN)}; in "
            "a block, model.logits can be changed before the token is drawn"
        )
    check_names(own, (*KNOWN, *ALIASES, "edits"), what)
    return Request(None, Sampling(**{**defaults, **own}), edits=edits)


def generation_defaults(config: Any) -> dict[str, Any]:
    """What a model's own generation config asks for, as transformers would do it."""
    if config is None or not getattr(config, "do_sample", False):
        return {}
    told = {name: getattr(config, name, None) for name in ("temperature", "top_p", "top_k")}
    return {"temperature": 1.0, **{name: value for name, value in told.items() if value is not None}}


class Draw:
    """Draws the tokens of one run."""

    def __init__(self, params: Sampling, device: torch.device) -> None:
        self._params = params
        self._generator: torch.Generator | None = None
        if params.seed is not None:
            self._generator = torch.Generator(device).manual_seed(params.seed)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """One token, `[1]`, from logits `[1, vocab]`."""
        params = self._params
        # As on vLLM, where blocks may have made NaN of them too.
        least, most = _limits(logits.dtype)
        logits = logits.nan_to_num(least, most, -torch.inf)
        if not params.temperature or logits.is_meta:
            return logits.argmax(-1)
        least, most = _limits(torch.float32)
        scaled = (logits.float() / params.temperature).nan_to_num(least, most, least)
        if params.top_k > 0:
            bound = scaled.topk(min(params.top_k, scaled.shape[-1])).values[..., -1:]
            scaled = scaled.masked_fill(scaled < bound, -torch.inf)
        probabilities = scaled.softmax(-1)
        if params.top_p < 1:
            probabilities = _nucleus(probabilities, params.top_p)
        return torch.multinomial(probabilities, 1, generator=self._generator)[:, 0]


@functools.cache
def _limits(dtype: torch.dtype) -> tuple[float, float]:
    limits = torch.finfo(dtype)
    return limits.min, limits.max


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """The likeliest tokens that together have `top_p`, the one that reaches it included."""
    ordered, order = probabilities.sort(-1, descending=True)
    kept = ordered.cumsum(-1) - ordered < top_p
    return torch.zeros_like(probabilities).scatter(-1, order, ordered * kept)


@dataclass(frozen=True, slots=True)
class Logprob:
    """The natural logarithm of a token's probability, and its rank among all."""

    logprob: float
    rank: int


def logprobs(logits: torch.Tensor, token: int, count: int) -> dict[int, Logprob]:
    """Of the drawn token and of the `count` likeliest, from logits `[vocab]` as the model made them."""
    values = logits.float().log_softmax(-1)
    best = cast("list[int]", values.topk(count).indices.tolist()) if count else []
    found = {number: Logprob(float(values[number]), rank) for rank, number in enumerate(best, 1)}
    if token not in found:
        found[token] = Logprob(float(values[token]), int((values > values[token]).sum()) + 1)
    return found
