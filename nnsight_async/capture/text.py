"""The text of a block, for who makes something else of it than code."""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple


class Text(NamedTuple):
    """Statements, and what names stand for around them.

    `seen` raises `KeyError` or `ValueError` for a name without a value. `names` are the variables that the text saves.
    """

    body: list[ast.stmt]
    seen: Callable[[str], Any]
    names: tuple[str, ...]
    filename: str
    first_line: int
    function: str
    traceback: TracebackType | None = None
