"""Statements that mean something only in the caller, and so cannot be part of a block."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from nnsight_async.errors import CaptureError

if TYPE_CHECKING:
    from nnsight_async.capture.source import Source

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_LOOPS = (ast.For, ast.While)

_NESTED = (
    "it is that of one request, and cannot start another; write `with model.trace() as tracer:` without a prompt, and "
    "in its body, side by side, `with tracer.invoke(prompt):` for each"
)
_AWAIT = "await it above the block and use the value; the block itself runs in the worker, where no event loop runs"
_YIELD = "collect the values in a list, save the list, and yield after the block"
_RETURN = "put the rest of the block under an `if`, or end the request with tracer.stop(); return after the block"
_JUMP = "the block runs elsewhere and cannot steer this loop; put the rest of the block under an `if`"
_OUTER = "assign a new name, save it, and write the outer variable after the block"
_SUPER = "write super(Class, self), or bind the method to a name above the block"
_STAR = "import the names that the block uses"


def check(body: list[ast.stmt], source: Source) -> None:
    """Raise CaptureError at the first statement of `body` that cannot be part of a block."""
    checker = _Checker(source)
    for statement in body:
        checker.visit(statement)


class _Checker(ast.NodeVisitor):
    def __init__(self, source: Source) -> None:
        self._source = source
        self._loops = 0
        self._functions = 0
        self._classes = 0

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, _FUNCTIONS):
            self._visit_function(node)
        elif isinstance(node, _LOOPS):
            self._visit_loop(node)
        elif isinstance(node, ast.ClassDef):
            self._visit_class(node)
        else:
            self._check(node)
            self.generic_visit(node)

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        for decorator in getattr(node, "decorator_list", ()):
            self.visit(decorator)
        self.visit(node.args)
        self._functions += 1
        loops, self._loops = self._loops, 0
        for child in node.body if isinstance(node.body, list) else [node.body]:
            self.visit(child)
        self._functions -= 1
        self._loops = loops

    def _visit_class(self, node: ast.ClassDef) -> None:
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(part)
        self._classes += 1
        for child in node.body:
            self.visit(child)
        self._classes -= 1

    def _visit_loop(self, node: ast.For | ast.While) -> None:
        for part in (node.target, node.iter) if isinstance(node, ast.For) else (node.test,):
            self.visit(part)
        self._loops += 1
        for child in node.body:
            self.visit(child)
        self._loops -= 1
        for child in node.orelse:
            self.visit(child)

    def _check(self, node: ast.AST) -> None:
        match node:
            case ast.Global():
                self._refuse(node, "global", _OUTER)
            case ast.Call(func=ast.Name(id="super"), args=[]) | ast.Name(id="__class__") if not self._classes:
                self._refuse(node, "super() without arguments", _SUPER)
            case _ if not self._functions:
                self._check_own_scope(node)
            case _:
                pass

    def _check_own_scope(self, node: ast.AST) -> None:
        match node:
            case ast.AsyncWith(items) if any(map(_starts_a_run, items)):
                self._refuse(node, "another trace", _NESTED)
            case ast.Await() | ast.AsyncFor() | ast.AsyncWith() | ast.comprehension(is_async=1):
                self._refuse(node, "await", _AWAIT)
            case ast.Yield() | ast.YieldFrom():
                self._refuse(node, "yield", _YIELD)
            case ast.Return():
                self._refuse(node, "return", _RETURN)
            case ast.Nonlocal():
                self._refuse(node, "nonlocal", _OUTER)
            case ast.ImportFrom(names=[ast.alias(name="*")]):
                self._refuse(node, "import *", _STAR)
            case ast.Break() | ast.Continue() if not self._loops:
                self._refuse(node, type(node).__name__.lower() + " of an outer loop", _JUMP)
            case _:
                pass

    def _refuse(self, node: ast.AST, what: str, instead: str) -> None:
        line: int = node.target.lineno if isinstance(node, ast.comprehension) else node.lineno  # type: ignore[attr-defined]
        raise CaptureError(
            f"{self._source.filename}, line {line}: {what} cannot be part of a block: {instead}.\n"
            f"    {self._source.line(line)}"
        )


def _starts_a_run(item: ast.withitem) -> bool:
    match item.context_expr:
        case ast.Call(ast.Attribute(attr="trace" | "invoke" | "generate" | "run" | "edit")):
            return True
        case _:
            return False
