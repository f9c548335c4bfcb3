"""The text of a function, parsed, and compiled again in the surroundings that its names need."""

from __future__ import annotations
import __future__

import ast
import inspect
import itertools
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType

from nnsight_async.errors import UnreadableError
from nnsight_async.parse import parse

Definition = ast.FunctionDef | ast.AsyncFunctionDef

_FUTURE_FLAGS = __future__.annotations.compiler_flag | __future__.generator_stop.compiler_flag


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """A function as it is written. `node` stands at the lines and columns of its file, without its decorators."""

    code: CodeType
    text: str
    first_line: int
    node: Definition

    def compile(self, extra: Sequence[str] = ()) -> CodeType:
        """The code of `node` as it is now; `extra` names become free variables if it uses them."""
        around = _surroundings(self.code, extra)
        _innermost(around).body = [self.node]
        flags = self.code.co_flags & _FUTURE_FLAGS
        module = compile(around, self.code.co_filename, "exec", flags, dont_inherit=True)
        found = next(code for code in _nested(module) if _is_of(code, self.node))
        return found.replace(co_qualname=self.code.co_qualname)


_known: dict[int, tuple[CodeType, Text | str]] = {}


def parsed(code: CodeType) -> Text:
    """The text that `code` was compiled from; `UnreadableError` if it cannot be had or has changed since."""
    known = _known.get(id(code))
    if known is None:  # the code is kept too, so that its id stays its own
        known = _known[id(code)] = (code, _parse(code))
    if isinstance(known[1], str):
        raise UnreadableError(known[1])
    return known[1]


def _parse(code: CodeType) -> Text | str:
    where = f"{code.co_qualname} ({code.co_filename}, line {code.co_firstlineno})"
    try:
        lines, first = inspect.getsourcelines(code)
        node = _definition("".join(lines), first)
    except (OSError, SyntaxError, IndexError, TypeError):
        node, lines, first = None, [], 0
    if node is None:
        return f"the source of {where} cannot be had"
    if node.name != code.co_name:
        return f"{where} is not a function defined by `def`"
    text = Text(code, textwrap.dedent("".join(lines)), first, node)
    return text if _agree(text.compile(), code, node) else f"the file of {where} has changed since it was loaded"


def _definition(text: str, first: int) -> Definition | None:
    indented = text[:1].isspace()
    tree = parse(f"class _:\n{text}" if indented else text)
    top = tree.body[0]
    node = top.body[0] if indented and isinstance(top, ast.ClassDef) else top
    if not isinstance(node, Definition):
        return None
    ast.increment_lineno(node, first - 1 - indented)
    node.decorator_list = []
    return node


def _surroundings(code: CodeType, extra: Sequence[str]) -> ast.Module:
    """A function with the free variables of `code`, and in it a class: private names and `super()` lean on that.

    The class has the name of the class that `code` is of, or one that makes nothing private. It is called global lest
    the name be taken for a variable of the function around.
    """
    parts = code.co_qualname.split(".")
    name = next(
        (part for part, inner in reversed([*itertools.pairwise(parts)]) if "<locals>" not in (part, inner)), "_"
    )
    free = [variable for variable in code.co_freevars if variable != "__class__"]
    head = f"def __nnsight_around__({', '.join([*free, *extra])}):\n"
    declared = "" if name in free else f" global {name}\n"
    return parse(f"{head}{declared} class {name}: pass")


def _innermost(tree: ast.Module) -> ast.ClassDef:
    return next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def _nested(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _nested(constant)


def _is_of(code: CodeType, node: Definition) -> bool:
    return code.co_name == node.name and code.co_firstlineno == node.lineno


def _agree(compiled: CodeType, running: CodeType, node: Definition) -> bool:
    """Whether the text says what runs; pytest compiles `assert` otherwise, so there only the outline is compared.

    Instructions are not compared: those of `torch.sum(x)` depend on whether the file imports `torch` (CPython 3.11).
    """
    if _outline(compiled) != _outline(running):
        return False
    return any(isinstance(part, ast.Assert) for part in ast.walk(node)) or _words(compiled) == _words(running)


def _outline(code: CodeType) -> tuple[object, ...]:
    arguments = code.co_argcount + code.co_kwonlyargcount
    return (code.co_argcount, code.co_kwonlyargcount, code.co_varnames[:arguments], sorted(code.co_freevars))


def _words(code: CodeType) -> tuple[object, ...]:
    constants = (constant for constant in code.co_consts if not isinstance(constant, frozenset))
    return (
        code.co_names,
        code.co_varnames,
        [_words(constant) if isinstance(constant, CodeType) else repr(constant) for constant in constants],
    )
