"""Who may read whose cached prefixes."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnsight_async.runs.edit import Installed


class Prefixes:
    """Keeps the keys and values that edited requests leave in vLLM's prefix cache from everybody else.

    A request with a block of its own, or with an edit that must see the whole prompt, neither reads cached prefixes nor
    leaves any. Requests that run the same rowwise edits, and nothing else, read each other's, until one of them fails:
    what it leaves was not edited to the end.
    """

    def __init__(self, cached: bool) -> None:
        self._cached = cached
        self._failures = 0
        self._salt = f"nnsight-{secrets.token_hex(16)}"
        """Which no request can choose as its own `cache_salt`."""

    def distrust(self) -> None:
        """A request with edits has failed: from now on, none reads what those before have left."""
        self._failures += 1

    def apart(
        self, prompt: Any, params: Any, key: int, edits: Sequence[Installed], *, block: bool, adapter: int = 0
    ) -> Any:
        """The prompt of a request, with what keeps its prefixes apart; `params` are changed, the prompt is not.

        `adapter`: how often its LoRA adapter has been exchanged, as vLLM (0.32, 0.33) goes by the name alone.
        """
        if not self._cached or not (block or edits or adapter):
            return prompt
        alone = block or not all(edit.rowwise for edit in edits)
        if alone:
            params.skip_reading_prefix_cache = True
        return _salted(prompt, f"{self._salt}-{key if alone else self._same(edits, adapter)}")

    def _same(self, edits: Sequence[Installed], adapter: int) -> str:
        """Equal for requests that run the same edits on the same weights, and for no others."""
        numbers = repr([adapter, *(edit.number for edit in edits)])
        return f"edits-{self._failures}-{hashlib.sha256(numbers.encode()).hexdigest()[:16]}"


def _salted(prompt: Any, salt: str) -> Any:
    if isinstance(prompt, str):
        return {"prompt": prompt, "cache_salt": salt}
    if isinstance(prompt, list):
        return {"prompt_token_ids": prompt, "cache_salt": salt}
    if isinstance(prompt, dict):
        own = prompt.get("cache_salt")
        return {**prompt, "cache_salt": f"{salt}-{own}" if own else salt}
    request = copy(prompt)  # vLLM's `EngineCoreRequest`
    request.cache_salt = f"{salt}-{request.cache_salt}" if request.cache_salt else salt
    return request
