"""Which names a body may read before it has assigned them: only those need a value from outside."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def read_first(body: list[ast.stmt]) -> tuple[frozenset[str], frozenset[str]]:
    """(names certainly read before any assignment, names read where only some paths have assigned them)."""
    flow = _Flow()
    flow.visit_all(body)
    return frozenset(flow.certain), frozenset(flow.possible - flow.certain)


class _Flow(ast.NodeVisitor):
    """Walks in the order of execution; `_surely` are the names assigned on every path to here, `_maybe` on some."""

    def __init__(self) -> None:
        self.certain: set[str] = set()
        self.possible: set[str] = set()
        self._surely: set[str] = set()
        self._maybe: set[str] = set()
        self._deferred = 0

    def visit_all(self, nodes: Iterable[ast.AST | None]) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)

    def _read(self, name: str) -> None:
        if name in self._surely:
            return
        if name in self._maybe or self._deferred:
            self.possible.add(name)
        else:
            self.certain.add(name)

    def _assign(self, name: str) -> None:
        self._surely.add(name)
        self._maybe.add(name)

    def _branches(self, *branches: Iterable[ast.AST | None]) -> None:
        """Exactly one of `branches` runs."""
        before, after = self._surely, list[set[str]]()
        for branch in branches:
            self._surely = set(before)
            self.visit_all(branch)
            after.append(self._surely)
        self._surely = set.intersection(*after)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self._assign(node.id)
            return
        self._read(node.id)
        if isinstance(node.ctx, ast.Del):
            self._surely.discard(node.id)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit_all([node.value, *node.targets])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit_all([node.value])
        if node.value is not None or not isinstance(node.target, ast.Name):
            self.visit(node.target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self._read(node.target.id)
        self.visit_all([node.value, node.target])

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit_all([node.value, node.target])

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.visit(node.values[0])
        self._branches(node.values[1:], [])

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        self._branches([node.body], [node.orelse])

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self._branches(node.body, node.orelse)

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        self._branches([*node.body, *node.orelse], [])

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self._branches([node.target, *node.body, *node.orelse], [])

    def visit_TryStar(self, node: ast.TryStar) -> None:
        self._visit_try(node)

    def visit_Try(self, node: ast.Try) -> None:
        self._visit_try(node)

    def _visit_try(self, node: ast.Try | ast.TryStar) -> None:
        before = set(self._surely)
        self.visit_all([*node.body, *node.orelse])
        after = [self._surely]
        for handler in node.handlers:
            self._surely = set(before)
            self.visit(handler)
            after.append(self._surely)
        self._surely = before
        self.visit_all(node.finalbody)
        self._surely |= set.intersection(*after)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self.visit_all([node.type])
        if node.name:
            self._assign(node.name)
        self.visit_all(node.body)
        self._surely.discard(node.name or "")

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        self._branches(*([case.pattern, case.guard, *case.body] for case in node.cases), [])

    def _visit_pattern(self, node: ast.MatchAs | ast.MatchStar | ast.MatchMapping) -> None:
        self.generic_visit(node)
        name = node.rest if isinstance(node, ast.MatchMapping) else node.name
        if name:
            self._assign(name)

    visit_MatchAs = visit_MatchStar = visit_MatchMapping = _visit_pattern  # noqa: N815

    def _visit_import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            self._assign(alias.asname or alias.name.partition(".")[0])

    visit_Import = visit_ImportFrom = _visit_import  # noqa: N815

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.visit_all([*node.decorator_list, *_evaluated(node.args), node.returns])
        self._assign(node.name)
        self._visit_inner(node.body, _parameters(node.args))

    visit_FunctionDef = visit_AsyncFunctionDef = _visit_function  # noqa: N815

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit_all(_evaluated(node.args))
        self._visit_inner([node.body], _parameters(node.args))

    def _visit_inner(self, body: list[ast.stmt] | list[ast.expr], own: set[str]) -> None:
        """A body that runs later, if at all; what it assigns is its own."""
        surely, maybe = self._surely, self._maybe
        own = own | assigned_in(body)
        self._surely, self._maybe = surely | own, maybe | own
        self._deferred += 1
        self.visit_all(body)
        self._deferred -= 1
        self._surely, self._maybe = surely, maybe

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.visit_all([*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)])
        surely, maybe = set(self._surely), set(self._maybe)
        self.visit_all(node.body)
        self._surely, self._maybe = surely, maybe
        self._assign(node.name)

    def _visit_comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        self.visit(node.generators[0].iter)
        before = set(self._surely)
        targets = {n.id for g in node.generators for n in ast.walk(g.target) if isinstance(n, ast.Name)}
        self._surely = before | targets
        for index, generator in enumerate(node.generators):
            self.visit_all([*generator.ifs] if index == 0 else [generator.iter, *generator.ifs])
        self.visit_all([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt])
        self._surely = before

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _visit_comprehension  # noqa: N815


def _evaluated(arguments: ast.arguments) -> list[ast.expr | None]:
    """What a definition evaluates at once: defaults and annotations."""
    annotations = [argument.annotation for argument in _all_arguments(arguments)]
    return [*arguments.defaults, *arguments.kw_defaults, *annotations]


def _parameters(arguments: ast.arguments) -> set[str]:
    return {argument.arg for argument in _all_arguments(arguments)}


def _all_arguments(arguments: ast.arguments) -> list[ast.arg]:
    starred = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *starred]


def assigned_in(body: Iterable[ast.AST]) -> set[str]:
    """Names that belong to the scope of `body`, found without its nested scopes."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            names.add(node.name)
            continue
        elif isinstance(node, (ast.Lambda, ast.Nonlocal)):
            continue
        elif isinstance(node, _COMPREHENSIONS):
            names |= {n.target.id for n in ast.walk(node) if isinstance(n, ast.NamedExpr)}
            continue
        names |= assigned_in(ast.iter_child_nodes(node))
    return names
