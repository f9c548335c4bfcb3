"""Runs a block that came as data, in the worker, as a block of Python runs.

Every value it computes is at most `LARGEST` elements, and what would be more is refused before it is computed. What it
holds in all is counted (`held.py`).
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
from nnsight_async.serve.bounds import (
    LONGEST,
    MOST_DIFFERENCES,
    NUMBERS,
    WIDEST,
    as_number,
    as_tensor,
    broadcast,
    check_applied,
    check_index,
    check_items,
    check_operands,
    check_parts,
    check_product,
    count,
    extent,
    fits,
    room,
)
from nnsight_async.serve.forms import MODEL, TRACER, forms
from nnsight_async.serve.held import Held, Room, items_in
from nnsight_async.tree.envoy import Envoy

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


class Program:
    """A block of statements, called as any block is: with the model and the tracer.

    `inplace` says that it may change a tensor after it has been saved (`interleave/foresight.py` asks for it).
    """

    def __init__(self, statements: Sequence[ops.Statement], room: Room | None = None) -> None:
        self.statements = statements
        self.room = room or Room()
        self.place = PLACE, "<module>"
        self.inplace = any(isinstance(node, ops.Change) for node in ops.nodes(list(statements)))

    @property
    def __nnsight_plain__(self) -> tuple[Any, ...] | None:
        """The block as one that need not run, if it is of the forms that such a one has (`tree/plans.py`)."""
        return forms(self.statements)

    def names(self, model: Any, tracer: Any) -> dict[str, Any]:
        """What names of those forms mean."""
        return {MODEL: model, TRACER: tracer}

    def __call__(self, model: Any, tracer: Any) -> None:
        held = Held(self.room)
        try:
            _Running(model, tracer, held).run(self.statements)
        finally:
            held.end()


class _Running:
    """One run of a program."""

    def __init__(self, model: Any, tracer: Any, held: Held) -> None:
        self._model = model
        self._tracer = tracer
        self._held = held
        self._names: dict[str, Any] = {}
        self._envoys: dict[str, Envoy] = {}

    def run(self, statements: Sequence[ops.Statement]) -> None:
        for statement in statements:
            # at the line of the client's text, for the traceback
            eval(_at(statement.line), {"step": functools.partial(self._statement, statement)})

    # -- statements ------------------------------------------------------------------------------------------------

    def _statement(self, statement: ops.Statement) -> None:
        self._held.begin()
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
                self._put(self.value(place.of), self._keys(place), change)

    def _put(self, whole: Any, keys: Any, change: ops.Change) -> None:
        check_index(whole, keys)
        value = self._changed(None if change.by == "=" else whole[keys], change)
        if not isinstance(whole, torch.Tensor):
            if isinstance(keys, slice):
                raise TypeError("items of lists are replaced one by one in a block that is data")
            check_parts([value], whole=whole)
            self._held.add_items(1, self._names.values())
        whole[keys] = value

    def _changed(self, before: Any, change: ops.Change) -> Any:
        value = self.value(change.value)
        if change.by == "=":
            return value
        check_operands(change.by, before, value)
        return self._held.add(fits(IN_PLACE[change.by](before, value)))

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
            case ops.Display():
                items = [self.value(item) for item in expression.items]
                check_parts(items)
                self._held.add_items(len(items), self._names.values())
                return tuple(items) if expression.fixed else items
            case ops.Item():
                return self._item(self.value(expression.of), self._keys(expression))
            case ops.Read():
                return self._held.add(self._read(expression), read=True)
            case ops.Step():
                return self._tracer.step
            case _:
                return self._held.add(self._computed(expression))

    def _item(self, whole: Any, keys: Any) -> Any:
        check_index(whole, keys)
        if isinstance(whole, torch.Tensor):
            return self._held.add(whole[keys])
        found = whole[keys]
        if isinstance(keys, slice):
            self._held.add_items(len(found), self._names.values())
        return found

    def _computed(self, expression: Any) -> Any:
        match expression:
            case ops.Binary():
                left, right = self.value(expression.left), self.value(expression.right)
                check_operands(expression.sign, left, right)
                return fits(SIGNS[expression.sign](left, right))
            case ops.Attribute():
                return getattr(as_tensor(self.value(expression.of)), expression.name)
            case ops.Negative():
                return -as_number(self.value(expression.of))
            case _:
                return self._called(expression)

    def _called(self, call: Any) -> Any:
        arguments: list[Any] = [self._argument(argument) for argument in call.arguments]
        if isinstance(call, ops.Apply):
            check_applied([self._envoy(call.path), *arguments])
            return fits(self._envoy(call.path)(*arguments))
        keywords = {name: self.value(value) for name, value in call.keywords.items()}
        if isinstance(keywords.get("dtype"), str):
            keywords["dtype"] = _dtype(keywords["dtype"])
        if isinstance(call, ops.Function):
            result = _function(call.name, arguments, keywords)
        else:
            result = _method(self.value(call.of), call.name, arguments, keywords)
        if made := _items_made(call, result):
            self._held.add_items(made, self._names.values())
        return result

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
        room(broadcast([as_tensor(argument) for argument in arguments]))
        return torch.where(*arguments)
    for argument in arguments:
        if not isinstance(argument, (*NUMBERS, list, tuple)):
            kind = type(argument).__name__
            raise TypeError(f"{name}() takes numbers, tensors and lists in a block that is data, not {kind}")
        if name in ("max", "min", "sum", "list") and count(argument) > LONGEST:
            raise ValueError(f"{name}() goes through at most {LONGEST} items; tensors have methods for more")
    if name in ("max", "min", "sum"):
        check_items(arguments)
    if name == "round" and any(abs(digits) > WIDEST for digits in arguments[1:]):
        raise ValueError(f"round() takes at most {WIDEST} digits in a block that is data")
    plain: dict[str, Callable[..., Any]] = {
        "len": len, "abs": abs, "max": max, "min": min, "float": float, "int": int, "round": round, "sum": sum,
        "list": list,
    }  # fmt: skip
    return fits(plain[name](*arguments))


def _items_made(call: ops.Function | ops.Method, result: Any) -> int:
    if call.name == "append":
        return 1
    if not isinstance(result, list):
        return 0
    return len(cast("list[Any]", result)) if call.name == "list" else items_in([result])


def _joined(name: str, arguments: list[Any], keywords: dict[str, Any]) -> torch.Tensor:
    parts, *rest = arguments
    room(sum(extent(as_tensor(part)) for part in parts))
    return (torch.cat if name == "cat" else torch.stack)(list(parts), *rest, **keywords)


def _method(of: Any, name: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
    if name == "append":
        if type(of) is not list or len(cast("list[Any]", of)) >= LONGEST:
            raise TypeError(f"append is of lists of at most {LONGEST} items")
        check_parts(arguments, whole=of)
        return cast("list[Any]", of).append(*arguments)
    tensor = as_tensor(of)
    if name == "to":
        return tensor.to(_dtype(arguments[0]) if arguments else keywords.get("dtype"))
    if name == "tolist" and extent(tensor) > LONGEST:
        raise ValueError(f"tolist() is for at most {LONGEST} elements in a block that is data")
    if name == "diff" and any(isinstance(times, int) and times > MOST_DIFFERENCES for times in arguments):
        raise ValueError(f"diff() subtracts at most {MOST_DIFFERENCES} times in a block that is data")
    others = [value for value in (*arguments, *keywords.values()) if isinstance(value, torch.Tensor)]
    if name in ("matmul", "dot"):
        check_product(tensor, *others)
    elif name == "outer":
        room(extent(tensor) * math.prod(map(extent, others)))
    elif others:
        room(broadcast([tensor, *others]))
    return fits(getattr(tensor, name)(*arguments, **keywords))


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
