"""Lists the operations of forwards where the modules are, for the manifest."""

from __future__ import annotations

import ast
import sys
from types import FunctionType
from typing import TYPE_CHECKING

from nnsight_async.errors import UnreadableError
from nnsight_async.interleave.functions import called, reach
from nnsight_async.interleave.instrument import instrument
from nnsight_async.tree.callees import UNKNOWN, callee_of
from nnsight_async.tree.manifest import OperationInfo, SourceInfo

if TYPE_CHECKING:
    import torch

    from nnsight_async.interleave.operations import Operation

LEVELS = 2
"""How many levels of functions called in a forward are listed; deeper ones are found when they run."""

LIBRARIES = frozenset({"torch", *sys.stdlib_module_names})


class Listing:
    """The sources of functions, each once, however many modules share them."""

    def __init__(self) -> None:
        self.sources: dict[str, SourceInfo] = {}

    def forward(self, module: torch.nn.Module) -> tuple[str | None, str]:
        """The key in `sources` of the forward of `module`; None and the reason if it has no operations."""
        if getattr(type(module).forward, "__name__", "") == "_forward_unimplemented":
            return None, f"{type(module).__name__} has no forward"
        try:
            return self._add(module.forward, LEVELS), ""
        except UnreadableError as error:
            return None, str(error)

    def _add(self, callee: object, levels: int) -> str:
        function, owner, _ = reach(callee)
        tool = instrument(function)
        operations = tuple(self._operation(each, function, owner, levels) for each in tool.operations.values())
        source = SourceInfo(called(function), tool.text.first_line, tool.text.text, operations)
        key, number = source.name, 1
        while self.sources.setdefault(key, source) != source:  # the same text, with other functions called in it
            number += 1
            key = f"{source.name}#{number}"
        return key

    def _operation(self, operation: Operation, function: FunctionType, owner: object, levels: int) -> OperationInfo:
        text = ast.unparse(operation.callee)
        callee = callee_of(operation.callee, function, owner)
        if callee is UNKNOWN or not callable(callee):
            return OperationInfo(operation.name, operation.line, text)
        try:
            inside = self._add(callee, levels - 1) if levels and not _of_library(callee) else _checked(callee)
        except UnreadableError as error:
            return OperationInfo(operation.name, operation.line, text, reason=str(error))
        return OperationInfo(operation.name, operation.line, text, inside)


def _of_library(callee: object) -> bool:
    return (getattr(callee, "__module__", None) or "").partition(".")[0] in LIBRARIES


def _checked(callee: object) -> None:
    """Raise for what has no operations; the operations of the rest are found when it runs."""
    function, _, _ = reach(callee)
    instrument(function)
