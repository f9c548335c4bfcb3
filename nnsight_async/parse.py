"""Python's parser, one thread at a time.

CPython 3.11 counts the depth of trees for all threads together: of two that make trees, one gets a `SystemError`.
"""

from __future__ import annotations

import ast
import threading

_parsing = threading.RLock()


def parse(text: str, filename: str = "<unknown>") -> ast.Module:
    """`ast.parse`."""
    with _parsing:
        return ast.parse(text, filename)


def parse_expression(text: str) -> ast.expr:
    """The one expression that `text` is."""
    with _parsing:
        return ast.parse(text, mode="eval").body
