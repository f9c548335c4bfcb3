"""Expressions of a block's text, as data."""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from types import ModuleType
from typing import Any, cast

import torch

from nnsight_async.capture.recompile import TracerName
from nnsight_async.errors import LocationError
from nnsight_async.interleave.context import save
from nnsight_async.runs.handle import Handle
from nnsight_async.serve import operations as ops
from nnsight_async.tree.envoy import Envoy
from nnsight_async.tree.model import ModelView

SIGNS: dict[type[ast.operator | ast.cmpop], ops.Sign] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.MatMult: "@",
    ast.BitAnd: "&", ast.BitOr: "|", ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">",
    ast.GtE: ">=",
}  # fmt: skip
TRACERS = (Handle, TracerName)
WHOLE = ("logits", "samples")
OTHERS = ("source", "heads", "skip", "tree", "trace", "run", "map", "generate", "edit", "tokenizer")

ABSENT: Any = object()


class Undeclared(Exception):  # noqa: N818 -- becomes a CaptureError that says where
    """`node` has no form as data."""

    def __init__(self, node: ast.AST, why: str) -> None:
        super().__init__(why)
        self.node = node
        self.why = why


class Names:
    """What the names of a body stand for: variables of its own, or things from outside that have a form as data."""

    def __init__(
        self,
        outer: Callable[[str], Any],
        assigned: frozenset[str],
        once: frozenset[str],
        owners: Collection[object],
        filled: Iterable[str] = (),
    ) -> None:
        """`filled`: names of things whose parts the body changes."""
        self.owners = owners
        self._outer = outer
        self._assigned = assigned
        self._once = once
        self.fixed: dict[str, Any] = {}
        """Names of the body that stand for a module or a number which is known here."""
        self.taken: dict[str, Any] = {}
        """Tensors, lists and dicts from outside, which travel once however often they are used."""
        self._filled = [found for name in filled if (found := self.outer(name)) is not ABSENT]

    def take(self, name: str, value: Any) -> str:
        """Have something from outside travel; returns the name that it has there."""
        for other, taken in self.taken.items():
            if taken is value:
                return other
        self.taken[name] = value
        return name

    def is_variable(self, name: str) -> bool:
        return name in self._assigned and name not in self.fixed

    def is_constant(self, name: str) -> bool:
        """Whether a variable, once it has a value, keeps it."""
        return name in self._once

    def known(self, name: str) -> Any:
        """What a name stands for here; `ABSENT` if it is only known in the worker, or nowhere."""
        if name in self.fixed:
            return self.fixed[name]
        found = self.outer(name)
        return ABSENT if any(found is filled for filled in self._filled) else found

    def outer(self, name: str) -> Any:
        """What a name of the surroundings stands for when the block begins; `ABSENT` if there is none."""
        if name in self._assigned:
            return ABSENT
        try:
            return self._outer(name)
        except (KeyError, ValueError):
            return getattr(builtins, name, ABSENT)


class Expressions:
    """Turns expressions into data; `Undeclared` for those that have no such form."""

    def __init__(self, names: Names) -> None:
        self.names = names

    # -- what is known here ----------------------------------------------------------------------------------------

    def known(self, node: ast.expr) -> Any:
        """What an expression is, where that is known before the block runs: a module, a number; else `ABSENT`."""
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self.names.known(node.id)
            case ast.Attribute() | ast.Subscript():
                return self._known_part(node)
            case ast.UnaryOp(op=ast.USub()):
                value = self.known(node.operand)
                return -value if type(value) in (int, float) else ABSENT
            case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.FloorDiv() | ast.Mod()):
                return self._known_sum(node)
            case ast.Call():
                return self._known_call(node)
            case _:
                return ABSENT

    def _known_part(self, node: ast.Attribute | ast.Subscript) -> Any:
        owner = self.known(node.value)
        try:
            if isinstance(node, ast.Attribute):
                return _attribute(owner, node.attr)
            return _item(owner, self._known_key(node.slice))
        except (
            LocationError,
            LookupError,
            ValueError,
            TypeError,
        ) as error:  # which a block of Python raises when it runs
            raise Undeclared(node, str(error)) from None

    def _known_key(self, node: ast.expr) -> Any:
        if not isinstance(node, ast.Slice):
            return self.known(node)
        ends = [None if end is None else self.known(end) for end in (node.lower, node.upper, node.step)]
        return slice(*ends) if all(end is None or type(end) is int for end in ends) else ABSENT

    def _known_sum(self, node: ast.BinOp) -> Any:
        left, right = self.known(node.left), self.known(node.right)
        if type(left) is not int or type(right) is not int or max(abs(left), abs(right)) > 1 << 62:
            return ABSENT
        signs: dict[type, Callable[[int, int], int]] = {
            ast.Add: int.__add__, ast.Sub: int.__sub__, ast.Mult: int.__mul__, ast.FloorDiv: int.__floordiv__,
            ast.Mod: int.__mod__,
        }  # fmt: skip
        return ABSENT if right == 0 else signs[type(node.op)](left, right)

    def _known_call(self, node: ast.Call) -> Any:
        """`range(...)` and `len(...)` of what is known."""
        function, arguments = self.known(node.func), [self.known(argument) for argument in node.args]
        if node.keywords or function not in (range, len, enumerate, reversed) or ABSENT in arguments:
            return ABSENT
        if function is range:
            return range(*arguments) if all(type(argument) is int for argument in arguments) else ABSENT
        sized = len(arguments) == 1 and isinstance(arguments[0], (Envoy, list, tuple, range))
        if not sized:
            return ABSENT
        return len(arguments[0]) if function is len else list(function(list(arguments[0])))

    # -- expressions -----------------------------------------------------------------------------------------------

    def data(self, node: ast.expr) -> ops.Expression:
        """An expression as data."""
        match node:
            case ast.Name() if self.names.is_variable(node.id):
                return ops.Variable(node.id)
            case ast.Attribute():
                return self._attribute(node)
            case ast.Call():
                return self._call(node)
            case ast.List() | ast.Tuple():
                return ops.Display([self.data(item) for item in node.elts], isinstance(node, ast.Tuple))
            case ast.Subscript() if self.known(node) is ABSENT:
                return ops.Item(self.data(node.value), self.keys(node.slice))
            case ast.BinOp() if type(node.op) in SIGNS and self.known(node) is ABSENT:
                return ops.Binary(SIGNS[type(node.op)], self.data(node.left), self.data(node.right))
            case ast.Compare(ops=[sign], comparators=[right]) if type(sign) in SIGNS:
                return ops.Binary(SIGNS[type(sign)], self.data(node.left), self.data(right))
            case ast.UnaryOp(op=ast.USub()) if self.known(node) is ABSENT:
                return ops.Negative(self.data(node.operand))
            case _:
                return self._value(node)

    def read(self, node: ast.expr) -> ops.Read | None:
        """`MODULE.output` and the like."""
        if not isinstance(node, ast.Attribute):
            return None
        owner = self.known(node.value)
        if isinstance(owner, Envoy) and node.attr in ops.PARTS:
            return ops.Read(node.attr, self.path(owner, node))  # type: ignore[arg-type]
        if isinstance(owner, ModelView) and node.attr in WHOLE:
            return ops.Read(node.attr)  # type: ignore[arg-type]
        return None

    def path(self, envoy: Envoy, node: ast.AST) -> str:
        """The path of a module of the model that is traced."""
        if not any(envoy.__block_owner__ is owner for owner in self.names.owners):
            raise Undeclared(node, "it belongs to another model")
        return envoy.__block_reference__()[1]

    def keys(self, node: ast.expr) -> list[ops.Key]:
        """The keys of a subscript."""
        return [self._key(item) for item in (node.elts if isinstance(node, ast.Tuple) else [node])]

    def _key(self, node: ast.expr) -> ops.Key:
        if isinstance(node, ast.Slice):
            return ops.Slice(*(None if end is None else self.data(end) for end in (node.lower, node.upper, node.step)))
        if isinstance(node, ast.Constant) and node.value is ...:
            return ops.Rest()
        return self.data(node)

    def _attribute(self, node: ast.Attribute) -> ops.Expression:
        read = self.read(node)
        if read is not None:
            return read
        owner = self.known(node.value)
        if isinstance(owner, TRACERS) and node.attr == "step":
            return ops.Step()
        if owner is ABSENT and node.attr in ops.ATTRIBUTES:
            return ops.Attribute(node.attr, self.data(node.value))
        return self._value(node)

    def _value(self, node: ast.expr) -> ops.Expression:
        value = self.known(node)
        if value is ABSENT and isinstance(node, ast.Name):
            value = self.names.outer(node.id)
        if value is ABSENT:
            raise Undeclared(node, "this kind of expression has no form as data")
        if not is_plain(value):
            kind = type(value).__qualname__ if not callable(value) else "function or a class"
            raise Undeclared(node, f"it is a {kind}, which has no form as data")
        if isinstance(node, ast.Name) and isinstance(value, (torch.Tensor, list, dict)):
            return ops.Variable(self.names.take(node.id, value))
        return ops.Value(value)

    def changed(self, node: ast.expr) -> ops.Expression:
        """What is changed in place: something that has a name, so that it is the same wherever it is used."""
        of = self.data(node)
        if isinstance(of, ops.Value):
            raise Undeclared(node, "what is changed in place has a name of its own, or is a part of what has one")
        return of

    def _call(self, node: ast.Call) -> ops.Expression:
        function = self.known(node.func)
        if isinstance(function, Envoy):
            return ops.Apply(self.path(function, node), self._modules(node))
        if is_save(node, function):
            raise Undeclared(node, "a save stands where its value gets a name: `name = value.save()`")
        name = getattr(function, "__name__", "")
        arguments = [self._argument(argument) for argument in node.args]
        keywords = {self._keyword(keyword): self._argument(keyword.value) for keyword in node.keywords}
        if function is not ABSENT and getattr(torch, name, None) is function:
            return self._of_torch(node, name, arguments, keywords)
        if function is not ABSENT and name in ops.FUNCTIONS and getattr(builtins, name, None) is function:
            return ops.Function(name, arguments, keywords)
        if isinstance(node.func, ast.Attribute) and not isinstance(self.known(node.func.value), (Envoy, ModelView)):
            return self._method(node, node.func, arguments, keywords)
        raise Undeclared(node, "only tensors' own methods, a few functions of PyTorch and modules can be called")

    def _of_torch(
        self, node: ast.Call, name: str, arguments: list[ops.Expression], keywords: dict[str, ops.Expression]
    ) -> ops.Expression:
        if name in ("cat", "stack", "where"):
            return ops.Function(name, arguments, keywords)
        if name not in ops.METHODS or not arguments:
            raise Undeclared(node, f"torch.{name} has no form as data")
        return ops.Method(name, arguments[0], arguments[1:], keywords)

    def _method(
        self, node: ast.Call, of: ast.Attribute, arguments: list[ops.Expression], keywords: dict[str, ops.Expression]
    ) -> ops.Expression:
        if of.attr not in ops.METHODS | {"to", "append"}:
            raise Undeclared(node, f".{of.attr}() has no form as data")
        owner = self.changed(of.value) if of.attr == "append" else self.data(of.value)
        return ops.Method(of.attr, owner, arguments, keywords)

    def _modules(self, node: ast.Call) -> list[ops.Expression | ops.Module]:
        if node.keywords:
            raise Undeclared(node, "a module is called with positional arguments")
        found = [(argument, self.known(argument)) for argument in node.args]
        return [ops.Module(self.path(known, of)) if isinstance(known, Envoy) else self.data(of) for of, known in found]

    def _argument(self, node: ast.expr) -> ops.Expression:
        known = self.known(node)
        if isinstance(known, torch.dtype):
            return ops.Value(str(known).removeprefix("torch."))
        if isinstance(node, ast.Starred):
            raise Undeclared(node, "`*` has no form as data")
        return self.data(node)

    def _keyword(self, keyword: ast.keyword) -> str:
        if keyword.arg not in ops.KEYWORDS:
            raise Undeclared(keyword.value, f"the argument {keyword.arg}= has no form as data")
        return keyword.arg


def is_plain(value: Any) -> bool:
    """Whether a value can travel as data."""
    if isinstance(value, str):
        return value.isascii() or value.encode(errors="ignore").decode() == value  # halves of surrogate pairs cannot
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, cast("list[Any]", value)))
    if type(value) is dict:
        return all(is_plain(part) for pair in cast("dict[Any, Any]", value).items() for part in pair)
    return value is None or isinstance(value, (bool, int, float, bytes, torch.Tensor))


def is_save(node: ast.Call, function: Any) -> bool:
    """Whether a call saves something."""
    return function is save or (isinstance(node.func, ast.Attribute) and node.func.attr == "save")


def _attribute(owner: Any, name: str) -> Any:
    """An attribute of what is known here, where that is known here too. No code of the user's runs for it."""
    if isinstance(owner, (Envoy, ModelView)):
        found = ABSENT if name in (*ops.PARTS, *WHOLE, *OTHERS) else getattr(owner, name)
        return found if isinstance(found, Envoy) else ABSENT
    if isinstance(owner, ModuleType):
        return vars(owner).get(name, ABSENT)
    if owner is ABSENT or isinstance(owner, (torch.Tensor, *TRACERS)):
        return ABSENT
    found = inspect.getattr_static(owner, name, ABSENT)
    return found if is_plain(found) else ABSENT


def _item(owner: Any, key: Any) -> Any:
    if type(owner) is dict:
        return cast("dict[Any, Any]", owner).get(key, ABSENT) if isinstance(key, (int, str)) else ABSENT
    if key is ABSENT or not isinstance(owner, (Envoy, list, tuple, range)) or not isinstance(key, (int, slice, str)):
        return ABSENT
    if isinstance(key, str) and not isinstance(owner, Envoy):
        return ABSENT
    return cast("Any", owner)[key]


def unrolled(items: Any) -> Sequence[Any] | None:
    """The items of a loop whose passes are known here."""
    if isinstance(items, Envoy):
        return list(items)
    return list(items) if isinstance(items, (range, list, tuple)) and len(items) <= ops.MOST else None
