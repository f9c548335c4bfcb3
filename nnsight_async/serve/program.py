"""Runs a block that came as data, in the worker, as a block of Python runs.

Every value it computes is at most `LARGEST` elements, and what would be more is refused before it is computed.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, cast

import torch

from nnsight_async.interleave.context import current
from nnsight_async.serve import operations as ops
from nnsight_async.tree.envoy import Envoy

LARGEST = 1 << 26
"""Elements of one value."""
MOST_WORK = 1 << 37
"""Multiplications of one product of matrices."""
WIDEST = 4096
"""Bits of an integer."""
LONGEST = 1 << 16
"""Items of a list."""

PLACE = "<block>"
"""The file that errors of a block are said to be in; the client knows its real name."""

SIGNS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "@": operator.matmul, "==": operator.eq, "!=": operator.ne, "<": operator.lt,
    "<=": operator.le, ">": operator.gt, ">=": operator.ge, "&": operator.and_, "|": operator.or_,
}  # fmt: skip
IN_PLACE: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.iadd, "-": operator.isub, "*": operator.imul, "/": operator.itruediv,
}  # fmt: skip
NUMBERS = (torch.Tensor, int, float)


class Program:
    """A block of statements, called as any block is: with the model and the tracer.

    `inplace` says that it may change a tensor after it has been saved (`interleave/foresight.py` asks for it).
    """

    def __init__(self, statements: Sequence[ops.Statement]) -> None:
        self.statements = statements
        self.inplace = any(isinstance(node, ops.Change) for node in ops.nodes(list(statements)))

    def __call__(self, model: Any, tracer: Any) -> None:
        _Running(model, tracer).run(self.statements)


class _Running:
    """One run of a program."""

    def __init__(self, model: Any, tracer: Any) -> None:
        self._model = model
        self._tracer = tracer
        self._names: dict[str, Any] = {}
        self._envoys: dict[str, Envoy] = {}

    def run(self, statements: Sequence[ops.Statement]) -> None:
        for statement in statements:
            # at the line of the client's text, for the traceback
            eval(_at(statement.line), {"step": functools.partial(self._statement, statement)})

    # -- statements ------------------------------------------------------------------------------------------------

    def _statement(self, statement: ops.Statement) -> None:
        match statement:
            case ops.Let():
                self._names[statement.name] = self.value(statement.value)
            case ops.Save():
                current().save(self.value(statement.value), statement.name)
            case ops.Do():
                self.value(statement.value)
            case ops.Change():
                self._change(statement)
            case ops.Skip():
                self._envoy(statement.path).skip(self.value(statement.value))
            case ops.If():
                self.run(statement.body if _truth(self.value(statement.test)) else statement.otherwise)
            case ops.Steps():
                self._steps(statement)
            case ops.Stop():
                self._tracer.stop()

    def _steps(self, loop: ops.Steps) -> None:
        wanted = slice(loop.start, loop.stop, loop.stride) if loop.only is None else loop.only
        for number in self._tracer.iter[wanted]:
            if loop.name is not None:
                self._names[loop.name] = number
            self.run(loop.body)

    def _change(self, change: ops.Change) -> None:
        place = change.place
        match place:
            case ops.Variable():
                before = self.value(place)
                self._names[place.name] = self._changed(before, change)
            case ops.Read():
                after = self._changed(None if change.by == "=" else self.value(place), change)
                self._write(place, after)
            case ops.Item():
                whole, keys = self.value(place.of), self._keys(place)
                _check_index(whole, keys)
                whole[keys] = self._changed(None if change.by == "=" else whole[keys], change)

    def _changed(self, before: Any, change: ops.Change) -> Any:
        value = self.value(change.value)
        if change.by == "=":
            return value
        _check_operands(change.by, before, value)
        return _fits(IN_PLACE[change.by](before, value))

    def _write(self, place: ops.Read, value: Any) -> None:
        owner: Any = self._model if place.part in ("logits", "samples") else self._envoy(place.path)
        setattr(owner, place.part, value)

    # -- expressions -----------------------------------------------------------------------------------------------

    def value(self, expression: Any) -> Any:
        """What an expression comes to."""
        match expression:
            case ops.Value():
                return expression.value
            case ops.Variable():
                if expression.name not in self._names:
                    raise NameError(f"name {expression.name!r} is not defined")
                return self._names[expression.name]
            case ops.Read():
                return self._read(expression)
            case ops.Item():
                whole, keys = self.value(expression.of), self._keys(expression)
                _check_index(whole, keys)
                return whole[keys]
            case ops.Binary():
                left, right = self.value(expression.left), self.value(expression.right)
                _check_operands(expression.sign, left, right)
                return _fits(SIGNS[expression.sign](left, right))
            case _:
                return self._composed(expression)

    def _composed(self, expression: Any) -> Any:
        match expression:
            case ops.Display():
                items = [self.value(item) for item in expression.items]
                return tuple(items) if expression.fixed else items
            case ops.Attribute():
                return getattr(_tensor(self.value(expression.of)), expression.name)
            case ops.Negative():
                return -_number(self.value(expression.of))
            case ops.Step():
                return self._tracer.step
            case _:
                return self._called(expression)

    def _called(self, call: Any) -> Any:
        arguments: list[Any] = [self._argument(argument) for argument in call.arguments]
        if isinstance(call, ops.Apply):
            return _fits(self._envoy(call.path)(*arguments))
        keywords = {name: self.value(value) for name, value in call.keywords.items()}
        if isinstance(keywords.get("dtype"), str):
            keywords["dtype"] = _dtype(keywords["dtype"])
        if isinstance(call, ops.Function):
            return _function(call.name, arguments, keywords)
        return _method(self.value(call.of), call.name, arguments, keywords)

    def _argument(self, argument: Any) -> Any:
        return self._envoy(argument.path) if isinstance(argument, ops.Module) else self.value(argument)

    def _read(self, read: ops.Read) -> Any:
        owner: Any = self._model if read.part in ("logits", "samples") else self._envoy(read.path)
        return getattr(owner, read.part)

    def _keys(self, item: ops.Item) -> Any:
        keys = [self._key(key) for key in item.keys]
        return keys[0] if len(keys) == 1 else tuple(keys)

    def _key(self, key: Any) -> Any:
        if isinstance(key, ops.Slice):
            ends = (key.start, key.stop, key.step)
            return slice(*(None if end is None else self.value(end) for end in ends))
        return ... if isinstance(key, ops.Rest) else self.value(key)

    def _envoy(self, path: str) -> Envoy:
        if path not in self._envoys:
            self._envoys[path] = Envoy(self._model.tree.__block_owner__, path)
        return self._envoys[path]


def _function(name: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
    if name in ("cat", "stack"):
        return _joined(name, arguments, keywords)
    if name == "where":
        _room(_broadcast([_tensor(argument) for argument in arguments]))
        return torch.where(*arguments)
    for argument in arguments:
        if not isinstance(argument, (*NUMBERS, list, tuple)):
            raise TypeError(f"{name}() takes numbers, tensors and lists in a block that is data, not {argument!r:.40}")
    plain: dict[str, Callable[..., Any]] = {
        "len": len, "abs": abs, "max": max, "min": min, "float": float, "int": int, "round": round, "sum": sum,
        "list": list,
    }  # fmt: skip
    return _fits(plain[name](*arguments))


def _joined(name: str, arguments: list[Any], keywords: dict[str, Any]) -> torch.Tensor:
    parts, *rest = arguments
    _room(sum(_tensor(part).numel() for part in parts))
    return (torch.cat if name == "cat" else torch.stack)(list(parts), *rest, **keywords)


def _method(of: Any, name: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
    if name == "append":
        if type(of) is not list or len(cast("list[Any]", of)) >= LONGEST:
            raise TypeError(f"append is of lists of at most {LONGEST} items")
        return cast("list[Any]", of).append(*arguments)
    tensor = _tensor(of)
    if name == "to":
        return tensor.to(_dtype(arguments[0]) if arguments else keywords["dtype"])
    others = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    if name in ("matmul", "dot"):
        _check_product(tensor, *others)
    elif name == "outer":
        _room(tensor.numel() * math.prod(other.numel() for other in others))
    elif others:
        _room(_broadcast([tensor, *others]))
    return _fits(getattr(tensor, name)(*arguments, **keywords))


def _check_operands(sign: str, left: Any, right: Any) -> None:
    if sign in ("==", "!=") and not isinstance(left, torch.Tensor) and not isinstance(right, torch.Tensor):
        return
    _number(left)
    _number(right)
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if sign == "@":
            _check_product(left, right)
        else:
            _room(_broadcast([left, right]))


def _check_product(*tensors: torch.Tensor) -> None:
    left, right = tensors if len(tensors) == 2 else (tensors[0], tensors[0])
    if not left.ndim or not right.ndim:
        return  # which torch refuses
    rows = left.numel() // max(left.shape[-1], 1)
    columns = right.numel() // max(right.shape[-2 if right.ndim > 1 else -1], 1)
    batch = max(math.prod(left.shape[:-2]), math.prod(right.shape[:-2]), 1)
    _room(rows * columns * batch if batch > 1 else rows * columns)
    if rows * columns * left.shape[-1] > MOST_WORK:
        raise ValueError("a product of matrices this large is more than a block that is data may compute")


def _check_index(whole: Any, keys: Any) -> None:
    """What `whole[keys]` will take, where tensors or lists choose elements."""
    if not isinstance(whole, (torch.Tensor, list, tuple, dict)):
        raise TypeError(f"{type(whole).__name__} has no items in a block that is data")
    if not isinstance(whole, torch.Tensor):
        return
    each = cast("tuple[Any, ...]", keys if isinstance(keys, tuple) else (keys,))
    choosing = [(at, key) for at, key in enumerate(each) if isinstance(key, (torch.Tensor, list))]
    if choosing and whole.numel():
        chosen = math.prod(_count(key) for _, key in choosing)
        known = len(choosing) == 1 and ... not in [key for key in each if key is ...] and choosing[0][0] < whole.ndim
        size = whole.shape[choosing[0][0]] if known else min(whole.shape)
        _room(chosen * whole.numel() // max(size, 1))


def _count(key: Any) -> int:
    return key.numel() if isinstance(key, torch.Tensor) else len(key)


def _broadcast(tensors: Sequence[torch.Tensor]) -> int:
    return math.prod(torch.broadcast_shapes(*(tensor.shape for tensor in tensors)))


def _room(elements: int) -> None:
    if elements > LARGEST:
        raise ValueError(f"a value of {elements:,} elements; a block that is data may have {LARGEST:,}")


def _fits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        _room(value.numel())
    elif isinstance(value, int) and value.bit_length() > WIDEST:
        raise OverflowError(f"an integer of more than {WIDEST} bits")
    return value


def _number(value: Any) -> Any:
    if not isinstance(value, NUMBERS):
        raise TypeError(f"tensors and numbers can be computed with in a block that is data, not {type(value).__name__}")
    return value


def _tensor(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"this is for tensors, and not for a value of type {type(value).__name__}")
    return value


def _truth(value: Any) -> bool:
    return bool(value)


def _dtype(name: Any) -> torch.dtype:
    if name not in ops.DTYPES:
        raise TypeError(
            f"a block that is data knows the dtypes {', '.join(sorted(ops.DTYPES))}, not {str(name)[:40]!r}"
        )
    return getattr(torch, name)


@functools.lru_cache(maxsize=1024)
def _at(line: int) -> CodeType:
    return compile("step()", PLACE, "eval").replace(co_firstlineno=line or 1)
