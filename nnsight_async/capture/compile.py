from __future__ import annotations

import ast
import dis
import marshal
import weakref
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from nnsight_async.capture.filled import Filled, filled
from nnsight_async.capture.find import find
from nnsight_async.capture.forgotten import Forgotten, carried, forgotten
from nnsight_async.capture.kept import Kept, kept_outside
from nnsight_async.capture.live import read_first
from nnsight_async.capture.plain import Form, plain
from nnsight_async.capture.rewrite import carrying, rewrite_saves
from nnsight_async.capture.rules import check
from nnsight_async.capture.scope import mangle
from nnsight_async.capture.unlisted import nested_codes
from nnsight_async.errors import CaptureError
from nnsight_async.parse import parse

if TYPE_CHECKING:
    from types import CodeType, FrameType

    from nnsight_async.capture.find import Statement

PARAMETERS = ("__nnsight_model__", "__nnsight_tracer__")
_NAME = "__nnsight_block__"
_GLOBAL_READS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "DELETE_GLOBAL"})


_Form = tuple[tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True)
class Template:
    """The function that a body becomes; its first parameters are the model and the tracer, which the text never names.

    Names that the body assigns and may read before are further parameters, as far as they have a value outside;
    names that it only reads are globals of the function.
    """

    names: tuple[str, ...]
    free: tuple[str, ...]
    certain: frozenset[str]
    possible: frozenset[str]
    lines: dict[str, int]  # where each name is first used
    attributes: frozenset[str]
    kept: tuple[Kept, ...]
    forgotten: tuple[Forgotten, ...]
    filled: tuple[Filled, ...]
    statement: Statement
    _body: list[ast.stmt]
    _codes: dict[_Form, bytes] = field(default_factory=dict["_Form", bytes])

    @cached_property
    def carried(self) -> tuple[str, ...]:
        """Names that the code around reads, and the body assigns without saving them."""
        return carried(self.statement, self.names)

    @cached_property
    def plain(self) -> tuple[Form, ...] | None:
        """The body as data, where it is of few forms."""
        return plain(self.statement.node.body, self.statement.class_name)

    def code(self, entries: tuple[str, ...], carried: tuple[str, ...] = ()) -> bytes:
        """The marshalled code with `entries` as further parameters; at its end, it saves what is `carried`."""
        known = self._codes.get((entries, carried))
        if known is None:
            body = carrying(self._body, carried) if carried else self._body
            code = _compile(body, self.statement, entries)
            known = self._codes[entries, carried] = marshal.dumps(code)
        return known


_templates: dict[tuple[int, int], Template] = {}


def template(frame: FrameType) -> Template:
    """The body of the `with` that `frame` is entering, compiled; CaptureError if it holds what no block can."""
    code = frame.f_code
    key = (id(code), frame.f_lasti)
    known = _templates.get(key)
    if known is None:
        known = _templates[key] = _template(find(frame))
        weakref.finalize(code, _templates.pop, key, None)  # a template does not keep the code it was made from
    return known


def _template(statement: Statement) -> Template:
    check(statement.node.body, statement.source)
    certain, possible = read_first(statement.node.body)
    body, names = rewrite_saves(statement.node.body)
    code = _compile(body, statement, ())
    own = set(code.co_varnames) | set(code.co_cellvars)
    mangled = {mangle(name, statement.class_name): name for name in certain | possible}
    return Template(
        names=names,
        free=global_reads(code),
        certain=frozenset(m for m, name in mangled.items() if name in certain and m in own),
        possible=frozenset(m for m, name in mangled.items() if name in possible and m in own),
        lines=_first_uses(statement),
        attributes=attribute_names(code),
        kept=kept_outside(statement.node.body, certain, names),
        forgotten=forgotten(statement, names),
        filled=filled(statement.node.body, certain, names, statement.around),
        statement=statement,
        _body=body,
    )


def _compile(body: list[ast.stmt], statement: Statement, entries: tuple[str, ...]) -> CodeType:
    source, node = statement.source, statement.node
    lines = node.lineno, node.end_lineno or node.lineno
    place = Place(source.filename, lines, statement.function, statement.qualname, statement.class_name, statement.flags)
    return function_code(body, (*PARAMETERS, *entries), place)


class Place(NamedTuple):
    """What a function made of statements is said to be, and where; `flags` of the future imports in force."""

    filename: str
    lines: tuple[int, int]
    function: str
    qualname: str
    class_name: str | None
    flags: int


def function_code(body: list[ast.stmt], parameters: tuple[str, ...], place: Place) -> CodeType:
    """The code of a function with `body`; `CaptureError` for what the compiler refuses."""
    tree = parse(f"def {_NAME}({', '.join(parameters)}): pass")
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = body
    function.lineno, function.end_lineno = place.lines
    if place.class_name is not None:  # for the sake of private names
        around = parse(f"class {place.class_name}: pass")
        around.body[0].body = [function]  # type: ignore[attr-defined]
        tree = around
    try:
        module = compile(tree, place.filename, "exec", place.flags, dont_inherit=True)
    except SyntaxError as error:
        where = f"{place.filename}, line {error.lineno}"
        raise CaptureError(f"{where}: {error.msg}, in the body of a block") from None
    code = next(code for code in nested_codes(module) if code.co_name == _NAME)
    return code.replace(co_name=place.function, co_qualname=place.qualname)


def global_reads(code: CodeType) -> tuple[str, ...]:
    """Names that `code`, and every code inside it, looks up in its globals, in the order of first use."""
    instructions = (instruction for inner in nested_codes(code) for instruction in dis.get_instructions(inner))
    return tuple(dict.fromkeys(i.argval for i in instructions if i.opname in _GLOBAL_READS))


def attribute_names(code: CodeType) -> frozenset[str]:
    return frozenset(name for inner in nested_codes(code) for name in inner.co_names)


def _first_uses(statement: Statement) -> dict[str, int]:
    uses: dict[str, int] = {}
    for node in ast.walk(ast.Module(statement.node.body, [])):
        if isinstance(node, ast.Name):
            name = mangle(node.id, statement.class_name)
            uses[name] = min(node.lineno, uses.get(name, node.lineno))
    return uses
