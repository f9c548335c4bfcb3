from __future__ import annotations
import __future__

import ast
import functools
import linecache
import operator
from collections import OrderedDict
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any

from nnsight_async.capture.unlisted import unlisted_lines
from nnsight_async.errors import CaptureError
from nnsight_async.parse import parse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_FEATURES: list[int] = [getattr(__future__, name).compiler_flag for name in __future__.all_feature_names]
# nested_scopes shares its bit with CO_NESTED, and the other features that Python 2 had do not differ here
_FUTURE_FLAGS = functools.reduce(operator.or_, _FEATURES) & ~0xFFFF

_KEPT = 16
_cache: OrderedDict[tuple[str, int], tuple[list[str], Source]] = OrderedDict()


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """The text of one file or cell, parsed, and compiled with the flags of the code that runs."""

    filename: str
    lines: list[str]
    flags: int
    tree: ast.Module
    module: CodeType

    def line(self, number: int) -> str:
        return self.lines[number - 1].strip() if 0 < number <= len(self.lines) else ""

    def parse(self) -> ast.Module:
        """A fresh tree that the caller may change."""
        return parse("".join(self.lines), self.filename)

    def compile(self, tree: ast.Module) -> CodeType:
        return compile(tree, self.filename, "exec", self.flags, dont_inherit=True)

    def alone(self, statement: Any) -> Iterator[CodeType]:
        """One statement of the text, compiled as the whole of a file and as what is typed at a prompt."""
        yield self.compile(ast.Module([statement], []))
        yield compile(ast.Interactive([statement]), self.filename, "single", self.flags, dont_inherit=True)


def source_of(code: CodeType, namespace: Mapping[str, Any]) -> Source:
    """The present source of `code`; CaptureError where there is none."""
    filename = code.co_filename
    linecache.checkcache(filename)
    lines = linecache.getlines(filename, dict(namespace) if "__loader__" in namespace else None)
    flags = future_flags(code) | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    if not lines and not (lines := unlisted_lines(code, flags)):
        raise no_source(code)
    known = _cache.get((filename, flags))
    if known is not None and (known[0] is lines or known[0] == lines):
        return known[1]
    source = _read(code, lines, flags)
    _cache[filename, flags] = (lines, source)
    while len(_cache) > _KEPT:
        _cache.popitem(last=False)
    return source


def _read(code: CodeType, lines: list[str], flags: int) -> Source:
    text = "".join(lines)
    try:
        tree = parse(text, code.co_filename)
        module = compile(text, code.co_filename, "exec", flags, dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise changed(code, code.co_firstlineno) from error
    return Source(code.co_filename, lines, flags, tree, module)


def future_flags(code: CodeType) -> int:
    return code.co_flags & _FUTURE_FLAGS


def no_source(code: CodeType) -> CaptureError:
    return CaptureError(
        f"the source of {code.co_filename!r} cannot be had, so the body of this `with` cannot become a block. "
        "Use the function form, which needs no source:\n"
        "    def probe(model, tracer): ...\n"
        "    model.run(prompt, probe)"
    )


def changed(code: CodeType, line: int) -> CaptureError:
    if code.co_filename.startswith("<"):
        return no_source(code)
    return CaptureError(
        f"{code.co_filename} changed after it was loaded: its text near line {line} is not what "
        f"`{code.co_name}` was compiled from. Reload the module (importlib.reload) or start the program again."
    )
