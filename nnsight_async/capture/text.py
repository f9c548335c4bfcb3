"""The text of a block, for who makes something else of it than code."""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple


class Written(NamedTuple):
    """Statements as they are written, and what it takes to make a function of them elsewhere (`capture/written.py`).

    `parameters` stand for the model and the tracer. The function has `free` from outside, as far as they have a value,
    and begins with values for those of `entries` that have one. `lines` are those of the whole statement or function.
    """

    text: str
    first_line: int
    lines: tuple[int, int]
    parameters: tuple[str, ...]
    free: tuple[str, ...]
    entries: tuple[str, ...]
    qualname: str
    class_name: str | None
    annotations: bool
    """Whether those stay text."""
    module: str


class Text(NamedTuple):
    """Statements, and what names stand for around them.

    `seen` raises `KeyError` or `ValueError` for a name without a value. `names` are the variables that the text saves.
    `written` is None where they cannot be cut out of the text around them.
    """

    body: list[ast.stmt]
    seen: Callable[[str], Any]
    names: tuple[str, ...]
    filename: str
    first_line: int
    function: str
    written: Callable[[], Written | None]
    traceback: TracebackType | None = None
