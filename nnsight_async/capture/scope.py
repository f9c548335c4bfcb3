from __future__ import annotations

import dis
from typing import TYPE_CHECKING, Any

from nnsight_async.capture.find import Statement, is_optimized
from nnsight_async.errors import CaptureError

if TYPE_CHECKING:
    from types import CodeType, FrameType


class Scope:
    """The names that a frame sees, by the rules of the frame's own code."""

    def __init__(self, frame: FrameType, statement: Statement) -> None:
        self._frame = frame
        self._locals = frame.f_locals
        self._class_name = statement.class_name
        self._local_names = statement.local_names
        self._declared_global = statement.declared_global

    def own(self, name: str) -> Any:
        """The value of a name that the frame itself binds; KeyError if it is unbound."""
        if name in self._declared_global:
            return self._frame.f_globals[name]
        if is_optimized(self._frame.f_code):
            return self._locals[name]
        return self.seen(name)

    def written(self, name: str) -> Any:
        """The same as `seen`, of a name as it stands in the text."""
        return self.seen(mangle(name, self._class_name))

    def seen(self, name: str) -> Any:
        """The value of a name that the frame reads; KeyError if it is unbound, or a builtin."""
        frame = self._frame
        if name not in self._declared_global:
            if name in self._locals:
                return self._locals[name]
            if name in self._local_names:
                self._check_reachable(name)
                if not _reads_global(frame.f_code, name):
                    raise KeyError(name)
        return frame.f_globals[name]

    def _check_reachable(self, name: str) -> None:
        code = self._frame.f_code
        if name in code.co_freevars and not is_optimized(code):
            raise CaptureError(
                f"{code.co_filename}, line {self._frame.f_lineno}: the block uses {name!r}, a variable of the function "
                f"around class {code.co_name}, which a class body does not show. Bind it there: {name} = {name}"
            )


def _reads_global(code: CodeType, name: str) -> bool:
    # from Python 3.12 the variables of comprehensions are among a function's locals without being its names
    return any(i.opname == "LOAD_GLOBAL" and i.argval == name for i in dis.get_instructions(code))


def mangle(name: str, class_name: str | None) -> str:
    """The name that `__x` has inside a class."""
    if class_name is None or not name.startswith("__") or name.endswith("__") or not class_name.strip("_"):
        return name
    return f"_{class_name.lstrip('_')}{name}"
