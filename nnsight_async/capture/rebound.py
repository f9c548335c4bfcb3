"""Whether functions bind global names anew that one another read: then they travel together, with one set of globals.

Variables of the functions around them are not looked at: cloudpickle (3.1) gives each function its own of those.
"""

from __future__ import annotations

import dis
from types import FunctionType
from typing import TYPE_CHECKING

from nnsight_async.capture.compile import global_reads
from nnsight_async.capture.unlisted import nested_codes

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import CodeType

_BINDING = frozenset(("STORE_GLOBAL", "DELETE_GLOBAL"))


def rebound(function: FunctionType, others: Iterable[object]) -> bool:
    """Whether one of the functions among `others` binds a global that `function` reads, or the other way."""
    namespace, code = function.__globals__, function.__code__
    codes = [other.__code__ for other in others if isinstance(other, FunctionType) and other.__globals__ is namespace]
    return any(_reaches(code, other) or _reaches(other, code) for other in codes)


def _reaches(binding: CodeType, reading: CodeType) -> bool:
    instructions = (instruction for inner in nested_codes(binding) for instruction in dis.get_instructions(inner))
    bound = {instruction.argval for instruction in instructions if instruction.opname in _BINDING}
    return not bound.isdisjoint(global_reads(reading))
