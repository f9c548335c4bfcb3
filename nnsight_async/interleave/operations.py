"""The operations of a function: the calls in its body, named in the order in which they are written."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, zip_longest

from nnsight_async.interleave.locations import Location

ANYTIME = -1
"""Stands among the loops of an operation in a lambda, a nested function or a generator: it runs when those do."""

FRAME_BOUND = frozenset({"super", "locals", "globals", "vars", "dir", "eval", "exec"})
"""Builtins that look at the frame of their caller, and would see another one if the call were reported."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One call. `place` counts the calls in the order of evaluation; `loops` are the loops around it, by number."""

    name: str
    line: int
    place: int
    loops: frozenset[int]
    callee: ast.expr = field(repr=False)
    node: ast.Call = field(repr=False)


def operations_of(body: Iterable[ast.AST]) -> list[Operation]:
    """The operations in the statements of a function, in the order in which their names are written."""
    calls = _Calls()
    for statement in body:
        calls.visit(statement, frozenset())
    evaluated = list(enumerate(calls.found))
    evaluated.sort(key=lambda item: (item[1][0].func.end_lineno or 0, item[1][0].func.end_col_offset or 0))
    named: Counter[str] = Counter()
    operations: list[Operation] = []
    for place, (node, loops) in evaluated:
        callee = node.func
        name, line = callee_name(callee), callee.end_lineno or node.lineno
        operations.append(Operation(f"{name}_{named[name]}", line, place, loops, callee, node))
        named[name] += 1
    return operations


def callee_name(callee: ast.expr) -> str:
    """The last part of the callee's name: `rotary_emb` of `self.rotary_emb`."""
    match callee:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value) | ast.Call(value):
            return callee_name(value)
        case _:
            return "call"


class _Calls:
    """Collects calls in the order in which Python evaluates them."""

    def __init__(self) -> None:
        self.found: list[tuple[ast.Call, frozenset[int]]] = []
        self._loop = count()

    def visit(self, node: ast.AST, loops: frozenset[int]) -> None:
        match node:
            case ast.Call(func):
                self._all(ast.iter_child_nodes(node), loops)
                if not (isinstance(func, ast.Name) and func.id in FRAME_BOUND):
                    self.found.append((node, loops))
            case ast.For() | ast.AsyncFor() | ast.While():
                self._repeated(node, loops)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                self._comprehension(node, loops)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                self._function(node, loops)
            case ast.ClassDef() | ast.arguments():
                pass
            case _:
                self._all(_evaluated(node), loops)

    def _all(self, nodes: Iterable[ast.AST], loops: frozenset[int]) -> None:
        for node in nodes:
            self.visit(node, loops)

    def _repeated(self, node: ast.For | ast.AsyncFor | ast.While, loops: frozenset[int]) -> None:
        if isinstance(node, ast.While):
            again: list[ast.AST] = [node.test]
        else:
            self.visit(node.iter, loops)
            again = [node.target]
        self._all([*again, *node.body], self._in_loop(loops))
        self._all(node.orelse, loops)

    def _in_loop(self, loops: frozenset[int]) -> frozenset[int]:
        return loops | {next(self._loop)}

    def _comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp, loops: frozenset[int]
    ) -> None:
        first, *others = node.generators
        self.visit(first.iter, loops)
        inside = loops | {ANYTIME} if isinstance(node, ast.GeneratorExp) else self._in_loop(loops)
        self._all([first.target, *first.ifs, *others], inside)
        self._all([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt], inside)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, loops: frozenset[int]) -> None:
        self._all([*node.args.defaults, *(default for default in node.args.kw_defaults if default)], loops)
        self._all([node.body] if isinstance(node, ast.Lambda) else node.body, loops | {ANYTIME})


def _evaluated(node: ast.AST) -> Iterable[ast.AST]:
    """The children of a node in the order in which they are evaluated, as far as that is not the written one."""
    match node:
        case ast.Assign(targets, value):
            return [value, *targets]
        case ast.AnnAssign(target, _, value):  # the annotation of a local variable is not evaluated
            return [target] if value is None else [value, target]
        case ast.Dict(keys, values):
            return [part for pair in zip(keys, values, strict=True) for part in pair if part is not None]
        case _:
            return ast.iter_child_nodes(node)


def surely_passed(asked: Location, reached: Location, ways: tuple[Sequence[Operation], Sequence[Operation]]) -> bool:
    """Whether `asked` cannot come any more in a call of the function that has got to `reached`.

    `ways` are the operations that lead to the one and to the other, from the forward inwards; where the two part, that
    which is evaluated first is over when the second begins, unless a loop may come back to it.
    """
    for mine, theirs in zip_longest(*ways):
        if mine is None:  # `reached` lies within what is asked for
            return asked.at_entry
        if theirs is None:  # `asked` lies within the operation that was reached
            return not reached.at_entry
        if mine.name != theirs.name:
            free = ANYTIME not in mine.loops | theirs.loops and not mine.loops & theirs.loops
            return free and mine.place < theirs.place
        if mine.loops:
            return False
    return asked.at_entry or not reached.at_entry
