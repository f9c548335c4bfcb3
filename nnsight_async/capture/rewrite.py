"""`EXPR.save()` and `NAME = save(EXPR)` become calls that know the name they are assigned to.

So do `EXPR.save("name")`, which only shows when it runs whether it saves `EXPR` or is the `save` of a tracer, and
`EXPR.grad` and `EXPR.backward`, which are refused where there are no gradients.
"""

from __future__ import annotations

import ast
import copy
from typing import TYPE_CHECKING, TypeGuard

from nnsight_async.capture.live import assigned_in
from nnsight_async.parse import parse_expression

if TYPE_CHECKING:
    from collections.abc import Sequence

CHANGED = frozenset({"save", "grad", "backward"})
"""Attributes whose use makes a function one to be rewritten."""

SAVES = "nnsight_async.interleave.context"
GRADIENTS = "nnsight_async.interleave.gradients"
_DISPLAYS = (ast.List, ast.Tuple, ast.Set, ast.Dict, ast.ListComp, ast.SetComp, ast.DictComp)
_SEQUENCES = (ast.Tuple, ast.List)


def rewrite_saves(body: list[ast.stmt]) -> tuple[list[ast.stmt], tuple[str, ...]]:
    """A rewritten copy of `body`, and the names it saves, in the order of the text."""
    rewriter = SaveRewriter()
    return rewriter.rewrite_body(copy.deepcopy(body)), tuple(rewriter.names)


def carrying(body: list[ast.stmt], names: Sequence[str]) -> list[ast.stmt]:
    """`body`, and then a call that saves those of `names` that are bound, also where the body stops the request."""
    call = _call(body[-1], "carry", _texts(names))
    last = ast.fix_missing_locations(ast.copy_location(ast.Expr(call), body[-1]))
    return [ast.copy_location(ast.Try(body, [], [], [last]), body[0])]


class SaveRewriter(ast.NodeTransformer):
    """Changes trees in place; names of functions and classes nested in the tree are their own and are not supplied."""

    def __init__(self, *, named: bool = True) -> None:
        self.names: dict[str, None] = {}
        self._depth = 0 if named else 1
        self._assigned_names: set[str] = set()

    def rewrite_body(self, body: list[ast.stmt]) -> list[ast.stmt]:
        self._assigned_names = assigned_in(body)
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
        if is_save(node):
            return self._save(node, [])
        if is_save_function(node):
            return self._named_save(node, [])
        if is_save_method(node):
            return self._method_save(node, [])
        return self.generic_visit(node)

    def _visit_pattern(self, node: ast.AST) -> ast.AST:
        return node  # a pattern holds names and attributes, but no calls

    visit_MatchValue = visit_MatchClass = _visit_pattern  # noqa: N815

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr in ("grad", "backward") and isinstance(node.ctx, ast.Load):
            return _call(node, "gradient", node.value, ast.Constant(node.attr), module=GRADIENTS)
        return node

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
        if is_save_method(call):
            return self._method_save(call, names)
        label = ast.Constant(ast.unparse(call.args[0]))
        function, value = self.visit(call.func), self.visit(call.args[0])
        return _call(call, "named_save", function, value, _texts(self._supplied(names)), label)

    def _method_save(self, call: _SaveCall, names: Sequence[str]) -> ast.expr:
        """`EXPR.save(ARGUMENT)`: of a tracer, the argument is saved, of a value, it is the name."""
        bound = not self._depth and not self._gives_name(call)
        receiver = self.visit(call.func.value)
        if call.keywords:
            return _call(call, "save_as", receiver, self.visit(call.keywords[0].value))
        label = ast.Constant(ast.unparse(call.args[0]))
        argument = self.visit(call.args[0])
        supplied = self._supplied(names) if bound else [] if self._depth else names
        return _call(call, "method_save", receiver, argument, _texts(supplied), label)

    def _gives_name(self, call: _SaveCall) -> bool:
        """Whether the argument is a name, as far as the text tells: tracers are not made in the body, values are."""
        match call.func.value:
            case ast.Name(receiver):
                return receiver in self._assigned_names
            case ast.Attribute():
                return is_named(call)
            case _:
                return True

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


def is_save_method(node: ast.expr) -> TypeGuard[_SaveCall]:
    """`EXPR.save(ARGUMENT)`, `EXPR.save(name=NAME)`."""
    if not isinstance(node, ast.Call) or not _is_attribute(node.func) or len(node.args) + len(node.keywords) != 1:
        return False
    return [keyword.arg for keyword in node.keywords] in ([], ["name"]) and not any(
        isinstance(argument, ast.Starred) for argument in node.args
    )


def is_named(node: ast.expr) -> bool:
    """`EXPR.save("name")`, `EXPR.save(name=NAME)`: a save under a name of its own."""
    return is_save_method(node) and (not node.args or _is_text(node.args[0]))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


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


def _texts(names: Sequence[str]) -> ast.expr:
    return ast.Tuple([ast.Constant(name) for name in names], ast.Load())


def _call(place: ast.expr | ast.stmt, function: str, *arguments: ast.expr, module: str = SAVES) -> ast.expr:
    # an import where it is used: the rewritten code needs nothing in its globals, which are the user's
    callee = parse_expression(f"__import__({module!r}, None, None, ({function!r},)).{function}")
    for node in ast.walk(callee):
        ast.copy_location(node, place)
    return ast.fix_missing_locations(ast.copy_location(ast.Call(callee, list(arguments), []), place))
