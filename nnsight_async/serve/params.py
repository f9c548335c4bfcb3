"""Sampling parameters as a client without vLLM has them: their names are checked here, their values by the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nnsight_async.engine.settings import check_names
from nnsight_async.errors import UnsupportedError
from nnsight_async.runs.request import Request

FIELDS = frozenset(
    """
    allowed_token_ids bad_words detokenize frequency_penalty ignore_eos include_stop_str_in_output logit_bias
    logprob_token_ids logprobs max_tokens min_p min_tokens n presence_penalty prompt_logprobs repetition_penalty seed
    skip_special_tokens spaces_between_special_tokens stop stop_token_ids temperature thinking_token_budget top_k top_p
    """.split()  # noqa: SIM905  twenty lines otherwise
)
"""Of vLLM's `SamplingParams` (0.32, 0.33), those that a served run may set."""

LOCAL = frozenset(
    """
    extra_args flat_logprobs output_kind prompt_logprob_start prompt_logprob_token_ids repetition_detection
    routed_experts_prompt_start skip_clone skip_reading_prefix_cache stream_interval structured_outputs
    output_text_buffer_length trace_decode_token_ids watermarking
    """.split()  # noqa: SIM905
)
"""The others: objects of vLLM's, its own business, and what would change what the server itself needs."""

ALIASES = {"max_new_tokens": "max_tokens"}


@dataclass(slots=True)
class Params:
    """What was asked for; `n` and `seed` are here because sequences of a prompt are runs of their own."""

    given: dict[str, Any]
    n: int = 1
    seed: int | None = None
    extra_args: dict[str, Any] | None = None

    def sampling(self) -> dict[str, Any]:
        """The parameters of one sequence, for the server."""
        seeded = {} if self.seed is None else {"seed": self.seed}
        return {**{name: value for name, value in self.given.items() if name not in ("n", "seed")}, **seeded}


def request_of(options: Mapping[str, Any], what: str) -> Request:
    """A request without a prompt, from the keywords of `trace` and the like; `TypeError` for an unknown one."""
    given = {ALIASES.get(name, name): value for name, value in options.items()}
    lora, priority, edits = given.pop("lora_request", None), given.pop("priority", 0), given.pop("edits", None)
    check_names(given, [*FIELDS, *LOCAL, *ALIASES], what)
    for name in sorted(LOCAL & given.keys()):
        raise UnsupportedError(f"{what} got {name}=, which a served model does not take")
    if lora is not None and not isinstance(lora, str):
        raise UnsupportedError("a served model takes the name of an adapter that its server has: lora_request='name'")
    n = given.get("n", 1)
    if type(n) is not int or n < 1:
        raise ValueError(f"n must be at least 1, got {n!r}.")
    if n > 1 and given.get("temperature") == 0:
        raise ValueError(f"n must be 1 when using greedy sampling, got {n}.")
    names = None if edits is None else tuple(edits)
    return Request(None, Params(given, n, given.get("seed")), lora, names, priority)
