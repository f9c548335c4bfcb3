"""The text of code that has neither a file nor an entry of its own in `linecache`."""

from __future__ import annotations

import ast
import sys
from itertools import chain, pairwise
from types import CodeType
from typing import TYPE_CHECKING, Any

from nnsight_async.parse import parse

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_LINES = 500
"""How far back what was typed is looked for."""


def unlisted_lines(code: CodeType, flags: int) -> list[str]:
    """The lines that `code` was compiled from: by `python -c`, at a prompt, or by a magic of IPython; or none."""
    texts = chain(_given_to_python(), _typed(), _given_to_magics())
    found = next((text for text in texts if _makes(text, code, flags)), "")
    return found.splitlines(keepends=True)


def nested_codes(code: CodeType) -> Iterator[CodeType]:
    """`code` and every code object inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested_codes(constant)


def _given_to_python() -> Iterator[str]:
    """What follows `-c`; from Python 3.13 on, `linecache` has it."""
    return (text for flag, text in pairwise(sys.orig_argv) if flag.startswith("-") and flag.endswith("c"))


def _typed() -> Iterator[str]:
    """Statements typed at Python's own prompt, the newest first; from Python 3.13 on, `linecache` has them."""
    readline: Any = sys.modules.get("readline")
    if readline is None or not hasattr(sys, "ps1"):
        return
    text, length = "", readline.get_current_history_length()
    for number in range(length, max(length - MOST_LINES, 0), -1):
        text = f"{readline.get_history_item(number)}\n{text}"
        for statement in _parsed(text).body[:1]:
            yield "".join(text.splitlines(keepends=True)[: statement.end_lineno])


def _given_to_magics() -> Iterator[str]:
    """The arguments of all magics in the cells so far, the newest first."""
    ipython: Any = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython is not None else None
    if shell is not None:
        for cell in reversed(shell.history_manager.input_hist_parsed):
            if "_magic(" in cell:
                yield from (shell.transform_cell(text) for text in _arguments(cell))


def _arguments(cell: str) -> Iterator[str]:
    for node in ast.walk(_parsed(cell)):
        match node:
            case ast.Call(ast.Attribute(attr="run_cell_magic" | "run_line_magic"), [*_, ast.Constant(str(text))]):
                yield text
            case _:
                pass


def _makes(text: str, code: CodeType, flags: int) -> bool:
    """Whether `text`, all of it or (for `%%time`) all but a last expression, compiles to `code`."""
    body = _parsed(text).body
    forms = ((ast.Module(body, []), "exec"), (ast.Module(body[:-1], []), "exec"), (ast.Interactive(body), "single"))
    try:
        compiled = [compile(tree, code.co_filename, mode, flags, dont_inherit=True) for tree, mode in forms]
    except SyntaxError:  # another command of this shell
        return False
    return any(inner == code for module in compiled for inner in nested_codes(module))


def _parsed(text: str) -> ast.Module:
    try:
        return parse(text)
    except (SyntaxError, ValueError):
        return ast.Module([], [])
