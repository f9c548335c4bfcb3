"""The demo's table, a line a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH = 20
GUESSES = 3
"""Tokens that a layer's reading is shown by, the likeliest first."""


def heading(question: str, layer: int) -> str:
    """The question, and the titles of the columns."""
    reading = f"top {GUESSES} after layer {layer}, had the model stopped there"
    return f"\n{question}\n\n{'token':<{WIDTH}}{reading}\n{'-' * 3 * WIDTH}"


def row(token: str, guesses: Sequence[str]) -> str:
    """One token and the guesses beside it, quoted so that blanks and line ends show."""
    return f"{token!r:<{WIDTH}}{'  '.join(f'{guess!r:<{WIDTH // 2}}' for guess in guesses)}".rstrip()
