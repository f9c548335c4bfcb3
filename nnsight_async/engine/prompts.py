"""The forms in which a prompt may be given, as vLLM's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

_ONE = "a trace takes one prompt; use model.generate for a list of plain prompts, or one trace per prompt"

Encode = Callable[[Sequence[Mapping[str, Any]]], list[int]]


def vllm_prompt(prompt: Any, chat: Encode) -> dict[str, Any]:
    """`prompt` as a dict of vLLM.

    Takes a string, token ids, a 1-D tensor of ids (or one row of a 2-D one), a tokenizer's output (its mask selects
    tokens), a chat (dicts with a role, turned into ids by `chat`), or one of vLLM's own dicts. Raises `ValueError` for
    an empty prompt or a list of prompts, `TypeError` for anything else.
    """
    if isinstance(prompt, str):
        return {"prompt": _filled(prompt)}
    if isinstance(prompt, Mapping):
        return _from_mapping(cast("Mapping[str, Any]", prompt))
    if hasattr(prompt, "tolist"):
        return {"prompt_token_ids": _ids(prompt.tolist())}
    if isinstance(prompt, Sequence):
        items = cast("Sequence[Any]", prompt)
        if items and all(isinstance(item, Mapping) and "role" in item for item in items):
            return {"prompt_token_ids": _ids(list(chat(items)))}
        return {"prompt_token_ids": _ids(list(items))}
    raise TypeError(
        f"a prompt is a string, token ids, a tensor of ids, a tokenizer's output, a chat or a vLLM prompt dict, not "
        f"{type(prompt).__name__}"
    )


def _from_mapping(prompt: Mapping[str, Any]) -> dict[str, Any]:
    if "input_ids" not in prompt:
        if not prompt:
            raise ValueError("the prompt is empty")
        return dict(prompt)
    ids = _row(prompt["input_ids"])
    if prompt.get("attention_mask") is not None:
        ids = [token for token, kept in zip(ids, _row(prompt["attention_mask"]), strict=True) if kept]
    return {"prompt_token_ids": _ids(ids)}


def _row(values: Any) -> list[Any]:
    listed: list[Any] = values.tolist() if hasattr(values, "tolist") else list(values)
    if listed and isinstance(listed[0], list):
        if len(listed) > 1:
            raise ValueError(_ONE)
        return cast("list[Any]", listed[0])
    return listed


def _ids(tokens: Any) -> list[int]:
    ids = _row(tokens) if isinstance(tokens, list) else [tokens]
    if any(not isinstance(token, int) or isinstance(token, bool) for token in ids):
        if all(isinstance(token, (str, list, Mapping)) for token in ids):
            raise ValueError(_ONE)
        raise TypeError("token ids are integers")
    return _filled(ids)


def _filled(prompt: Any) -> Any:
    if not len(prompt):
        raise ValueError("the prompt is empty: a run needs at least one token")
    return prompt
