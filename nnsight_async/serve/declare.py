"""The text of a block, as data, where it says nothing but what data can say."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeGuard

from nnsight_async.capture.live import assigned_in, read_first
from nnsight_async.errors import CaptureError
from nnsight_async.serve import operations as ops
from nnsight_async.serve.expressions import (
    ABSENT,
    TRACERS,
    Expressions,
    Names,
    Undeclared,
    is_plain,
    is_save,
    unrolled,
)
from nnsight_async.tree.envoy import Envoy

CHANGES: dict[type[ast.operator], ops.InPlace] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


def declared(
    body: Sequence[ast.stmt], outer: Callable[[str], Any], filename: str, owners: Collection[object]
) -> list[ops.Statement]:
    """`body` as data; `outer` gives what a name stands for around it, or raises `KeyError`.

    `owners` are what modules in it may belong to.

    Raises `CaptureError`, which names the statement that has no such form, and why.
    """
    assigned = frozenset(assigned_in(list(body)))
    declarer = _Declarer(Names(outer, assigned, assigned_once(body), owners, filled_in(body)))
    try:
        statements = declarer.all(body)
        taken = [ops.Let(name, ops.Value(value)) for name, value in declarer.names.taken.items()]
        return [*taken, *declarer.begin(body, outer, assigned), *statements]
    except Undeclared as error:
        node: Any = error.node
        text = ast.unparse(node).partition("\n")[0]
        shown = text if len(text) <= 80 else f"{text[:77]}..."
        raise CaptureError(f"{filename}, line {node.lineno}: `{shown}` cannot travel as data: {error.why}") from None


def assigned_once(body: Sequence[ast.stmt]) -> frozenset[str]:
    """Names that one place in `body` assigns, and no loop or branch again."""
    found = Counter(
        node.id for node in ast.walk(ast.Module(list(body), [])) if isinstance(node, ast.Name) and _is_stored(node)
    )
    at_top = {target.id for node in body if isinstance(node, ast.Assign) for target in node.targets if _is_name(target)}
    return frozenset(name for name in at_top if found[name] == 1)


def filled_in(body: Sequence[ast.stmt]) -> set[str]:
    """Names of what parts of are changed in `body`: by `append`, or as items."""
    changed = [
        node.value
        for node in ast.walk(ast.Module(list(body), []))
        if (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store))
        or (isinstance(node, ast.Attribute) and node.attr == "append")
    ]
    return {name for node in changed if (name := _base(node)) is not None}


def _base(node: ast.expr) -> str | None:
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


class _Declarer:
    def __init__(self, names: Names) -> None:
        self.names = names
        self._of = Expressions(names)

    def begin(
        self, body: Sequence[ast.stmt], outer: Callable[[str], Any], assigned: frozenset[str]
    ) -> Iterable[ops.Statement]:
        """The values from outside that variables of the body begin with."""
        for name in sorted(frozenset().union(*read_first(list(body))) & assigned):
            try:
                value = outer(name)
            except (KeyError, ValueError):
                continue
            if is_plain(value):
                yield ops.Let(name, ops.Value(value))

    def all(self, statements: Iterable[ast.stmt]) -> list[ops.Statement]:
        return [made for statement in statements for made in self._statement(statement)]

    def _statement(self, node: ast.stmt) -> Iterable[ops.Statement]:
        match node:
            case ast.Pass():
                return []
            case ast.Expr():
                return self._expression(node)
            case ast.Assign():
                return self._assign(node)
            case ast.AnnAssign(target=ast.Name() as target, value=ast.expr() as value):
                return self._bound(target, value, node.lineno)
            case ast.AugAssign() if type(node.op) in CHANGES:
                change = ops.Change(self._place(node.target), CHANGES[type(node.op)], self._of.data(node.value))
                return [_on(change, node)]
            case ast.For(orelse=[]):
                return self._loop(node)
            case ast.If():
                return [ops.If(self._of.data(node.test), self.all(node.body), self.all(node.orelse), node.lineno)]
            case _:
                raise Undeclared(node, "this kind of statement has no form as data")

    # -- expressions that stand alone ------------------------------------------------------------------------------

    def _expression(self, statement: ast.Expr) -> Iterable[ops.Statement]:
        node = statement.value
        if isinstance(node, ast.Constant):
            return []
        if isinstance(node, ast.Call):
            return self._called(node)
        return [ops.Do(self._of.data(node), node.lineno)]

    def _called(self, node: ast.Call) -> Iterable[ops.Statement]:
        if is_save(node, self._of.known(node.func)):
            value, name = self._saved(node)
            name = name or (value.id if isinstance(value, ast.Name) else None)
            if name is None:
                raise Undeclared(node, 'the value needs a name: `name = value.save()`, or `value.save("name")`')
            return [ops.Save(name, self._of.data(value), node.lineno)]
        if isinstance(node.func, ast.Attribute):
            owner = self._of.known(node.func.value)
            if isinstance(owner, TRACERS) and node.func.attr == "stop":
                return [ops.Stop(node.lineno)]
            if isinstance(owner, Envoy) and node.func.attr == "skip" and len(node.args) == 1:
                return [ops.Skip(self._of.path(owner, node), self._of.data(node.args[0]), node.lineno)]
        return [ops.Do(self._of.data(node), node.lineno)]

    def _saved(self, node: ast.Call) -> tuple[ast.expr, str | None]:
        """What a save saves, and the name that it gives itself."""
        function = self._of.known(node.func)
        receiver = None
        if isinstance(node.func, ast.Attribute) and not isinstance(self._of.known(node.func.value), TRACERS):
            receiver = None if function is not ABSENT else node.func.value
        given = list(node.args) if receiver is None else [receiver, *node.args]
        given += [keyword.value for keyword in node.keywords if keyword.arg == "name"]
        if not 1 <= len(given) <= 2 or any(keyword.arg != "name" for keyword in node.keywords):
            raise Undeclared(node, "a save takes a value and a name")
        if len(given) == 1:
            return given[0], None
        name = self._of.known(given[1])
        if not isinstance(name, str):
            raise Undeclared(node, "the name of a save is not known before the block runs")
        return given[0], name

    # -- assignments -----------------------------------------------------------------------------------------------

    def _assign(self, node: ast.Assign) -> list[ops.Statement]:
        if len(node.targets) == 1:
            return list(self._bound(node.targets[0], node.value, node.lineno))
        first, *others = node.targets
        made = list(self._bound(first, node.value, node.lineno))
        if not isinstance(first, ast.Name) or first.id in self.names.fixed:
            raise Undeclared(node, "several assignments at once have no form as data, unless the first is to a name")
        again = ast.copy_location(ast.Name(first.id, ast.Load()), node)
        for target in others:
            made += self._bound(target, again, node.lineno)
            if isinstance(node.value, ast.Call) and isinstance(target, ast.Name) and self._is_save(node.value):
                made.append(ops.Save(target.id, ops.Variable(target.id), node.lineno))
        return made

    def _is_save(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Call) and is_save(node, self._of.known(node.func))

    def _bound(self, target: ast.expr, value: ast.expr, line: int) -> Iterable[ops.Statement]:
        saves, name = self._is_save(value), None
        if saves:
            assert isinstance(value, ast.Call)
            value, name = self._saved(value)
        match target:
            case ast.Name():
                made = self._named(target.id, value, line, saves=saves)
                if saves:
                    made.append(ops.Save(name or target.id, ops.Variable(target.id), line))
                return made
            case ast.Tuple() | ast.List():
                return self._taken_apart(target, value, line, saves=saves)
            case _ if not saves:
                return [ops.Change(self._place(target), "=", self._of.data(value), line)]
            case _:
                raise Undeclared(target, "a save is bound to a name")

    def _named(self, name: str, value: ast.expr, line: int, *, saves: bool) -> list[ops.Statement]:
        known = self._of.known(value)
        constant = type(known) in (int, str) and self.names.is_constant(name) and not saves
        if constant or (known is not ABSENT and not is_plain(known) and not saves):
            self.names.fixed[name] = known
            return []
        self.names.fixed.pop(name, None)
        return [ops.Let(name, self._of.data(value), line)]

    def _taken_apart(
        self, target: ast.Tuple | ast.List, value: ast.expr, line: int, *, saves: bool
    ) -> Iterable[ops.Statement]:
        whole = f"({ast.unparse(target)})"  # no name of the text's can be this
        made: list[ops.Statement] = [ops.Let(whole, self._of.data(value), line)]
        for at, part in enumerate(target.elts):
            if not isinstance(part, ast.Name):
                raise Undeclared(part, "a value is taken apart into names alone")
            self.names.fixed.pop(part.id, None)
            made.append(ops.Let(part.id, ops.Item(ops.Variable(whole), [ops.Value(at)]), line))
            if saves:
                made.append(ops.Save(part.id, ops.Variable(part.id), line))
        return made

    def _place(self, target: ast.expr) -> ops.Item | ops.Read | ops.Variable:
        match target:
            case ast.Name() if self.names.is_variable(target.id):
                return ops.Variable(target.id)
            case ast.Subscript():
                return ops.Item(self._of.changed(target.value), self._of.keys(target.slice))
            case ast.Attribute() if (read := self._of.read(target)) is not None:
                return read
            case _:
                raise Undeclared(target, "only locations, their items, and names can be assigned")

    # -- loops -----------------------------------------------------------------------------------------------------

    def _loop(self, node: ast.For) -> Iterable[ops.Statement]:
        steps = self._steps(node)
        if steps is not None:
            return [steps]
        items = unrolled(self._of.known(node.iter))
        if items is None:
            raise Undeclared(
                node.iter, "loops as data go over tracer.iter, or over what is known before the block runs"
            )
        return [made for item in items for made in self._passed(node, item)]

    def _passed(self, node: ast.For, item: Any) -> Iterable[ops.Statement]:
        targets = node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]
        values = item if isinstance(node.target, ast.Tuple) else [item]
        for target, value in zip(targets, values, strict=True):
            if not isinstance(target, ast.Name):
                raise Undeclared(target, "a loop binds names")
            self.names.fixed[target.id] = value
        return self.all(node.body)

    def _steps(self, node: ast.For) -> ops.Steps | None:
        over = node.iter
        every = over.func if isinstance(over, ast.Call) and not over.args and _ends(over.func, "all") else over
        if (every is not over or _ends(over, "iter")) and self._is_tracer(every):
            steps = ops.Steps([])
        elif isinstance(over, ast.Subscript) and _ends(over.value, "iter") and self._is_tracer(over.value):
            steps = self._chosen(over)
        else:
            return None
        if not isinstance(node.target, ast.Name):
            raise Undeclared(node.target, "the steps bind a name")
        self.names.fixed.pop(node.target.id, None)
        steps.name, steps.line = node.target.id, node.lineno
        steps.body = self.all(node.body)
        return steps

    def _is_tracer(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Attribute) and isinstance(self._of.known(node.value), TRACERS)

    def _chosen(self, node: ast.Subscript) -> ops.Steps:
        chosen = node.slice
        if isinstance(chosen, ast.Slice):
            ends = [None if end is None else self._of.known(end) for end in (chosen.lower, chosen.upper, chosen.step)]
            if all(end is None or (type(end) is int and end >= 0) for end in ends) and ends[2] != 0:
                return ops.Steps([], ends[0] or 0, ends[1], ends[2] or 1)
        else:
            known = self._of.known(chosen)
            items = [self._of.known(item) for item in chosen.elts] if isinstance(chosen, ast.List) else known
            only = [items] if type(items) is int else list(items) if isinstance(items, (list, tuple, range)) else []
            if only and all(type(number) is int and number >= 0 for number in only):
                return ops.Steps([], only=sorted(only))
        raise Undeclared(
            node, "which steps these are is not known before the block runs, or they are counted from the end"
        )


def _is_name(node: ast.expr) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name)


def _is_stored(node: ast.Name) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _ends(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name


def _on(change: ops.Change, node: ast.stmt) -> ops.Change:
    change.line = node.lineno
    return change
