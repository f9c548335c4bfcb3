"""Text of tokens as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

INCOMPLETE = "\ufffd"
"""What a tokenizer writes for bytes that are no character yet."""


class Text:
    """The text that each token adds; a character that takes several tokens comes with its last.

    Tokens are decoded together with a few before them, because many tokenizers write a first word otherwise.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._ids: list[int] = []
        self._told = 0
        self._read = 0
        self._whole = ""

    def add(self, token: int) -> str:
        """What `token` adds."""
        if self._tokenizer is None:
            return ""
        self._ids.append(token)
        before = self._decoded(self._told, self._read)
        after = self._decoded(self._told, len(self._ids))
        if len(after) <= len(before) or after.endswith(INCOMPLETE):
            return ""
        self._told, self._read = self._read, len(self._ids)
        self._whole += after[len(before) :]
        return after[len(before) :]

    def stopped(self, added: str) -> tuple[str, str] | None:
        """The string to stop at that has come with the text added last, and what stays of that text; else None."""
        for stop in self._stops:
            at = self._whole.find(stop, max(0, len(self._whole) - len(added) - len(stop) + 1))
            if at >= 0:
                return stop, added[: max(0, at - (len(self._whole) - len(added)))]
        return None

    def _decoded(self, start: int, stop: int) -> str:
        return self._tokenizer.decode(self._ids[start:stop], skip_special_tokens=True)
