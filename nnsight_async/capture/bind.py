from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING

from nnsight_async.capture.find import is_optimized

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType


def bind(frame: FrameType, values: Mapping[str, object], declared_global: frozenset[str]) -> None:
    """Assign `values` to the variables of `frame`; names that its code does not have are left out."""
    for name in declared_global & values.keys():
        frame.f_globals[name] = values[name]
    own = {name: value for name, value in values.items() if name not in declared_global}
    if is_optimized(frame.f_code):
        code = frame.f_code
        slots = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        _assign(frame, {name: value for name, value in own.items() if name in slots})
    else:
        frame.f_locals.update(own)


def _assign(frame: FrameType, values: dict[str, object]) -> None:
    frame.f_locals.update(values)
    if sys.version_info < (3, 13):  # where f_locals is a copy
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
