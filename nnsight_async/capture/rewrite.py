"""`EXPR.save()` and `NAME = save(EXPR)` become calls that know the name they are assigned to."""

from __future__ import annotations

import ast
import copy
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from collections.abc import Sequence

SAVES = "nnsight_async.interleave.context"
_DISPLAYS = (ast.List, ast.Tuple, ast.Set, ast.Dict, ast.ListComp, ast.SetComp, ast.DictComp)
_SEQUENCES = (ast.Tuple, ast.List)


def rewrite_saves(body: list[ast.stmt]) -> tuple[list[ast.stmt], tuple[str, ...]]:
    """A rewritten copy of `body`, and the names it saves, in the order of the text."""
    rewriter = SaveRewriter()
    return rewriter.rewrite_body(copy.deepcopy(body)), tuple(rewriter.names)


class SaveRewriter(ast.NodeTransformer):
    """Changes trees in place; names of functions and classes nested in the tree are their own and are not supplied."""

    def __init__(self, *, named: bool = True) -> None:
        self.names: dict[str, None] = {}
        self._depth = 0 if named else 1

    def rewrite_body(self, body: list[ast.stmt]) -> list[ast.stmt]:
        rewritten: list[ast.stmt] = []
        for statement in body:
            result = self.visit(statement)
            rewritten.extend(result if isinstance(result, list) else [result])
        return rewritten

    def _visit_scope(self, node: ast.AST) -> ast.AST:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = _visit_scope  # noqa: N815

    def visit_Assign(self, node: ast.Assign) -> ast.AST | list[ast.stmt]:
        if len(node.targets) == 1 and (names := _unpacked_names(node.targets[0])) and is_save(node.value):
            return self._save_each(node, names)
        node.targets = [self.visit(target) for target in node.targets]
        node.value = self._assigned(node.targets, node.value)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self._assigned([node.target], node.value)
        return node

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.AST:
        node.value = self._assigned([node.target], node.value)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        call = node.value
        if is_save(call) and isinstance(call.func.value, ast.Name):
            node.value = self._save(call, [call.func.value.id])
        elif is_save_function(call) and isinstance(call.args[0], ast.Name):
            node.value = self._named_save(call, [call.args[0].id])
        else:
            self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return self._save(node, []) if is_save(node) else self.generic_visit(node)

    def _assigned(self, targets: Sequence[ast.expr], value: ast.expr) -> ast.expr:
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if isinstance(value, ast.NamedExpr):
            value.value = self._assigned([*targets, value.target], value.value)
        elif isinstance(value, ast.IfExp):
            value.test = self.visit(value.test)
            value.body = self._assigned(targets, value.body)
            value.orelse = self._assigned(targets, value.orelse)
        elif isinstance(value, _SEQUENCES) and _matches(targets, len(value.elts)):
            value.elts = [self._assigned([t.elts[i] for t in targets], e) for i, e in enumerate(value.elts)]  # type: ignore[attr-defined]
        elif names and is_save(value):
            return self._save(value, names)
        elif names and is_save_function(value):
            return self._named_save(value, names)
        elif names and isinstance(value, _DISPLAYS) and _unwrap(value):
            return self._saved(value, names, ast.unparse(value))
        else:
            return self.visit(value)
        return value

    def _save(self, call: _SaveCall, names: Sequence[str]) -> ast.expr:
        return self._saved(call.func.value, names, ast.unparse(call.func.value), place=call)

    def _saved(self, value: ast.expr, names: Sequence[str], label: str, place: ast.expr | None = None) -> ast.expr:
        place = place or value
        result = self.visit(value)
        for name in self._supplied(names) or [None]:
            result = _call(place, "save_expression", result, ast.Constant(name), ast.Constant(label))
        return result

    def _named_save(self, call: ast.Call, names: Sequence[str]) -> ast.expr:
        function, value = self.visit(call.func), self.visit(call.args[0])
        supplied = self._supplied(names)
        if not supplied:
            call.func, call.args = function, [value]
            return call
        result = _call(call, "named_save", function, value, ast.Constant(supplied[0]))
        for name in supplied[1:]:
            result = _call(call, "named_save", copy.deepcopy(function), result, ast.Constant(name))
        return result

    def _save_each(self, node: ast.Assign, names: list[str]) -> list[ast.stmt]:
        """`a, b = EXPR.save()`: the parts are what gets names, so the parts are saved."""
        call = node.value
        assert is_save(call)
        label = ast.unparse(call.func.value)
        node.value = self.visit(call.func.value)
        statements: list[ast.stmt] = [node]
        for index, name in enumerate(names):
            place = ast.copy_location(ast.Name(name, ast.Load()), call)
            value = self._saved(place, [name], f"{label}[{index}]")
            target = ast.copy_location(ast.Name(name, ast.Store()), call)
            statements.append(ast.copy_location(ast.Assign([target], value), node))
        return statements

    def _supplied(self, names: Sequence[str]) -> list[str]:
        if self._depth:
            return []
        self.names.update(dict.fromkeys(names))
        return list(names)


class _SaveCall(ast.Call):
    func: ast.Attribute  # type: ignore[assignment]


def is_save(node: ast.expr) -> TypeGuard[_SaveCall]:
    """`EXPR.save()`."""
    return isinstance(node, ast.Call) and _is_attribute(node.func) and not node.args and not node.keywords


def is_save_function(node: ast.expr) -> TypeGuard[ast.Call]:
    """`save(EXPR)`, `tracer.save(EXPR)`, `package.save(EXPR)`."""
    if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
        return False
    callee = _is_attribute(node.func) or (isinstance(node.func, ast.Name) and node.func.id == "save")
    return callee and not isinstance(node.args[0], ast.Starred)


def _is_attribute(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "save"


def _unpacked_names(target: ast.expr) -> list[str]:
    if not isinstance(target, _SEQUENCES):
        return []
    parts = [part.value if isinstance(part, ast.Starred) else part for part in target.elts]
    return [part.id for part in parts if isinstance(part, ast.Name)] if all(map(_is_name, parts)) else []


def _is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Name)


def _matches(targets: Sequence[ast.expr], count: int) -> bool:
    return bool(targets) and all(
        isinstance(target, _SEQUENCES)
        and len(target.elts) == count
        and not any(isinstance(part, ast.Starred) for part in target.elts)
        for target in targets
    )


def _unwrap(display: ast.expr) -> bool:
    """Take `.save()` off the elements of a display; whether there was one."""
    match display:
        case ast.List() | ast.Tuple() | ast.Set():
            found = [_unwrap_in(display.elts, i) for i in range(len(display.elts))]
        case ast.Dict():
            found = [_unwrap_in(display.values, i) for i in range(len(display.values))]
        case ast.ListComp() | ast.SetComp():
            found, display.elt = _unwrapped(display.elt)
            return found
        case ast.DictComp():
            found, display.value = _unwrapped(display.value)
            return found
        case _:
            return False
    return any(found)


def _unwrap_in(elements: list[ast.expr], index: int) -> bool:
    found, elements[index] = _unwrapped(elements[index])
    return found


def _unwrapped(element: ast.expr) -> tuple[bool, ast.expr]:
    return (True, element.func.value) if is_save(element) else (_unwrap(element), element)


def _call(place: ast.expr, function: str, *arguments: ast.expr) -> ast.expr:
    # an import where it is used: the rewritten code needs nothing in its globals, which are the user's
    module = f"__import__({SAVES!r}, None, None, ({function!r},)).{function}"
    callee = ast.parse(module, mode="eval").body
    for node in ast.walk(callee):
        ast.copy_location(node, place)
    return ast.fix_missing_locations(ast.copy_location(ast.Call(callee, list(arguments), []), place))
