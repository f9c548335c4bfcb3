"""The forms in which a prompt may be given, as vLLM's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, cast

_ONE = (
    "this takes one prompt, not a list of them: write `with tracer.invoke(prompt):` for each in `with model.trace() as "
    "tracer:`, or use model.map(prompts, probe), or model.generate(prompts) without a block"
)
_EMPTY = "the prompt is empty: a run needs at least one token"
# What a tokenizer returns beside the ids, and what says nothing that a model of text would need.
_BESIDE = frozenset({"attention_mask", "token_type_ids", "special_tokens_mask", "offset_mapping", "length"})
_VLLM = ("prompt_token_ids", "prompt_embeds", "prompt")

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
    if isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
        items = cast("Sequence[Any]", prompt)
        if items and all(map(_is_message, items)):
            return {"prompt_token_ids": _ids(list(chat(items)))}
        return {"prompt_token_ids": _ids(list(items))}
    raise TypeError(
        f"a prompt is a string, token ids, a tensor of ids, a tokenizer's output, a chat or a vLLM prompt dict, not "
        f"{type(prompt).__name__}"
    )


def is_several(prompts: Any) -> bool:
    """Whether this is a list of prompts, rather than one prompt that is a list (token ids, a chat)."""
    if not isinstance(prompts, (list, tuple)) or not prompts:
        return False
    first = cast("Any", prompts[0])
    return not isinstance(first, Integral) and not _is_message(first)


def _is_message(item: Any) -> bool:
    return isinstance(item, Mapping) and "role" in item


def _from_mapping(prompt: Mapping[str, Any]) -> dict[str, Any]:
    if "input_ids" in prompt:
        return {"prompt_token_ids": _ids(_selected(prompt))}
    given = next((key for key in _VLLM if prompt.get(key) is not None), None)
    if given is not None:
        _filled(prompt[given])
        return _checked(dict(prompt))
    if _is_message(prompt):
        raise ValueError("a chat is a list of messages: put this one in a list")
    if not prompt:
        raise ValueError(_EMPTY)
    raise ValueError(
        f"a prompt dict needs input_ids, prompt_token_ids, prompt or prompt_embeds; this one has {', '.join(prompt)}"
    )


def _checked(prompt: dict[str, Any]) -> dict[str, Any]:
    """Raise `TypeError` where vLLM (0.32, 0.33) does not look, and its engine would end decoding the request."""
    salt, ids = prompt.get("cache_salt"), prompt.get("prompt_token_ids")
    if salt is not None and not isinstance(salt, str):
        raise TypeError(f"cache_salt={salt!r}: a string is expected")
    if ids is not None:
        prompt["prompt_token_ids"] = _ids(ids.tolist() if hasattr(ids, "tolist") else list(ids))
    return prompt


def _selected(prompt: Mapping[str, Any]) -> list[Any]:
    """The ids of a tokenizer's output that its mask keeps."""
    if unused := [key for key in prompt if key != "input_ids" and key not in _BESIDE]:
        raise ValueError(
            f"{', '.join(unused)} would be ignored beside input_ids; give images and the like in vLLM's own form, "
            '{"prompt": ..., "multi_modal_data": ...}'
        )
    ids = _row(prompt["input_ids"])
    if prompt.get("attention_mask") is None:
        return [*ids]
    mask = _row(prompt["attention_mask"])
    if len(mask) != len(ids):
        raise ValueError(f"attention_mask has {len(mask)} entries for {len(ids)} input_ids")
    return [token for token, kept in zip(ids, mask, strict=True) if kept]


def _row(values: Any) -> list[Any]:
    listed: list[Any] = values.tolist() if hasattr(values, "tolist") else list(values)
    if listed and isinstance(listed[0], list):
        if len(listed) > 1:
            raise ValueError(_ONE)
        return cast("list[Any]", listed[0])
    return listed


def _ids(tokens: Any) -> list[int]:
    ids = _row(tokens) if isinstance(tokens, list) else [tokens]
    if ids and all(type(token) is int for token in ids):
        return [*ids]
    if not all(map(_is_id, ids)):
        if any(_is_prompt(token) for token in ids):
            raise ValueError(_ONE)
        raise TypeError("token ids are integers")
    return _filled([int(token) for token in ids])


def _is_id(item: Any) -> bool:
    return isinstance(item, Integral) and item is not True and item is not False


def _is_prompt(item: Any) -> bool:
    """Whether an item of a list could be a prompt by itself."""
    return isinstance(item, (str, list, tuple, Mapping)) or getattr(item, "ndim", 0) > 0


def _filled(prompt: Any) -> Any:
    if not len(prompt):
        raise ValueError(_EMPTY)
    return prompt
