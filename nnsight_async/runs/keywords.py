"""The keywords of a request under vLLM's own names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ALIASES = {"max_new_tokens": "max_tokens"}
"""Names that transformers has for them."""

PLAIN = frozenset(
    """
    allowed_token_ids bad_words detokenize frequency_penalty ignore_eos include_stop_str_in_output logit_bias
    logprob_token_ids logprobs max_tokens min_p min_tokens n presence_penalty prompt_logprobs repetition_penalty seed
    skip_special_tokens spaces_between_special_tokens stop stop_token_ids temperature thinking_token_budget top_k top_p
    """.split()  # noqa: SIM905  twenty lines otherwise
)
"""Of vLLM's `SamplingParams` (0.32, 0.33), those that a served run may set."""

OTHERS = frozenset(
    """
    extra_args flat_logprobs output_kind prompt_logprob_start prompt_logprob_token_ids repetition_detection
    routed_experts_prompt_start skip_clone skip_reading_prefix_cache stream_interval structured_outputs
    output_text_buffer_length trace_decode_token_ids watermarking
    """.split()  # noqa: SIM905
)
"""The others: objects of vLLM's, its own business, and what would change what the server itself needs."""


def named(given: Mapping[str, Any], what: str) -> dict[str, Any]:
    """`given` without other names than vLLM's; `TypeError` where one setting was given under two."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        own = ALIASES.get(name, name)
        if own in found:
            other = next(alias for alias, real in ALIASES.items() if real == own)
            raise TypeError(f"{what} got both {own}= and {other}=, which are one setting: leave one of them out")
        found[own] = value
    return found


def over(general: Mapping[str, Any], own: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The keywords of an invoke, over those of its trace."""
    return {**named(general, what), **named(own, what)}
