"""The forms of a prompt, and its tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from nnsight_async.engine.prompts import vllm_prompt

BESIDE_IDS = frozenset({"input_ids", "attention_mask"})
IMAGES = "inputs"
"""In a prompt: what a processor made beside the ids."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, the text that they are of, and what else the forward pass takes (images, say)."""

    ids: Sequence[int]
    text: str | None = None
    beside: Mapping[str, Any] = field(default_factory=dict[str, Any])


def given_prompt(prompt: Any, chat: Callable[[Sequence[Mapping[str, Any]]], list[int]]) -> dict[str, Any]:
    """`prompt` as a dict; the forms are those of the engine, and a processor's output with images and the like.

    `ValueError` for an empty prompt or several, `TypeError` for what is none.
    """
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        given = cast("Mapping[str, Any]", prompt)
        text = {name: given[name] for name in given if name in BESIDE_IDS}
        beside = {name: given[name] for name in given if name not in BESIDE_IDS}
        return {**vllm_prompt(text, chat), **({IMAGES: beside} if beside else {})}
    return vllm_prompt(prompt, chat)


def tokenized(prompt: Mapping[str, Any], tokenizer: Any, vocabulary: int) -> Prompt:
    """The tokens of what `given_prompt` returned; `ValueError` for none, and for ids that the model does not have."""
    text: str | None = prompt.get("prompt")
    ids: list[int] | None = prompt.get("prompt_token_ids")
    if ids is None:
        if text is None:
            raise ValueError("a prompt of a local model is text or token ids, not embeddings")
        if tokenizer is None:
            raise ValueError("this model has no tokenizer: give token ids")
        ids = tokenizer(text)["input_ids"]
        if not ids:
            raise ValueError("the prompt is empty: a run needs at least one token")
    assert ids is not None
    if wrong := [number for number in ids if not 0 <= number < vocabulary]:
        raise ValueError(f"the token id {wrong[0]} is not in the vocabulary, which has {vocabulary}")
    return Prompt(ids, text, prompt.get(IMAGES, {}))
