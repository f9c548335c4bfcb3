"""Whether a text is what a running code object was compiled from.

The two may differ inside `assert` statements (pytest rewrites them) and in jumps. An import hook that adds code
(typeguard, beartype) is accepted as long as the file is older than this process's import of this module.
"""

from __future__ import annotations

import ast
import dis
import sys
import time
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOADED = time.time()
_JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)
_NO_EVIDENCE = frozenset({"EXTENDED_ARG", "NOP", "RESUME", "CACHE", "COPY_FREE_VARS", "MAKE_CELL"})
_SHOWING = frozenset({"POP_TOP", "PRINT_EXPR"})  # what a prompt does with the value of an expression differs
_ALIASES = {"LOAD_FAST_CHECK": "LOAD_FAST"}  # which of the two depends on the flow around it


class Span(NamedTuple):
    line: int
    column: int
    end_line: int
    end_column: int

    @classmethod
    def of(cls, node: ast.AST) -> Span:
        return cls(node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def covers(self, other: Span) -> bool:
        return self[:2] <= other[:2] and other[2:] <= self[2:]

    def precedes(self, other: Span) -> bool:
        return self.end_line <= other.line and self[2:] < other[2:]


def agree(running: CodeType, compiled: CodeType, node: ast.AST, tree: ast.Module) -> bool:
    """Whether the two codes do the same within `node`, a part of `tree`."""
    if running == compiled and running.co_linetable == compiled.co_linetable:
        return True
    within = Span.of(node)
    asserts = [Span.of(child) for child in ast.walk(tree) if isinstance(child, ast.Assert)]
    runs, says = (set(_traits(code, asserts)) for code in (running, compiled))
    return _next_line(runs, within) <= says and _same_inside(runs, says, within, running.co_filename)


def _same_inside(runs: set[_Trait], says: set[_Trait], within: Span, filename: str) -> bool:
    runs = {trait for trait in runs if trait.span is None or within.covers(trait.span)}
    says = {trait for trait in says if trait.span is None or within.covers(trait.span)}
    return runs == says or (says < runs and _unchanged_since_start(filename))


def _next_line(runs: set[_Trait], within: Span) -> set[_Trait]:
    """What runs on the first line after `within`: the last line of the body, if that was taken out of the text."""
    after = [(trait.span.line, trait) for trait in runs if trait.span is not None and within.precedes(trait.span)]
    first = min((line for line, _ in after), default=0)
    return {trait for line, trait in after if line == first}


class _Trait(NamedTuple):
    span: Span | None
    operation: str
    argument: object


def _traits(code: CodeType, asserts: list[Span]) -> Iterator[_Trait]:
    for instruction in dis.get_instructions(code):
        span = _span(instruction)
        if instruction.opname in _NO_EVIDENCE or _shows(instruction):
            continue
        if span is None or not any(outer.covers(span) for outer in asserts):
            operation = _ALIASES.get(instruction.opname, instruction.opname)
            yield _Trait(span, operation, _argument(instruction, asserts))


def _shows(instruction: dis.Instruction) -> bool:
    return instruction.opname in _SHOWING or instruction.argrepr == "INTRINSIC_PRINT"


def _argument(instruction: dis.Instruction, asserts: list[Span]) -> object:
    value = instruction.argval
    if instruction.opcode in _JUMPS:
        return None
    if isinstance(value, CodeType):
        return value.co_name, frozenset(_traits(value, asserts))
    if isinstance(value, frozenset):
        return tuple(sorted(map(repr, value)))
    return repr(value) if instruction.opcode in dis.hasconst else instruction.argrepr


def _span(instruction: dis.Instruction) -> Span | None:
    place = instruction.positions
    if place is None or place.lineno is None or place.end_lineno is None:
        return None
    if place.col_offset is None or place.end_col_offset is None:  # python -X no_debug_ranges
        return Span(place.lineno, sys.maxsize, place.end_lineno, 0)
    return Span(place.lineno, place.col_offset, place.end_lineno, place.end_col_offset)


def _unchanged_since_start(filename: str) -> bool:
    try:
        return Path(filename).stat().st_mtime < _LOADED
    except OSError:
        return False
