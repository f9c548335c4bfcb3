"""The text of a block, for who makes something else of it than code."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
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
    `written` is None where they cannot be cut out of the text around them. `attributes` are all that it uses of modules
    of the user's. Values of `optional` names may stay behind: the text may well assign those first. `rebound` says
    whether one of some functions binds a global anew that the text reads, or reads one that the text binds.
    """

    body: list[ast.stmt]
    seen: Callable[[str], Any]
    names: tuple[str, ...]
    filename: str
    first_line: int
    function: str
    written: Callable[[], Written | None]
    attributes: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    rebound: Callable[[Iterable[object]], bool] = lambda _: False
    traceback: TracebackType | None = None
