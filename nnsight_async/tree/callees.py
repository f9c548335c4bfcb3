"""What a call in a function will call, as far as it can be told without running anything."""

from __future__ import annotations

import ast
import builtins
import inspect
from types import FunctionType, MethodType, ModuleType
from typing import cast

import torch

UNKNOWN = object()
"""What is called is decided while the function runs."""


def callee_of(callee: ast.expr, function: FunctionType, owner: object) -> object:
    """The object that the expression `callee` in `function`, a method of `owner` or none, stands for, or UNKNOWN."""
    match callee:
        case ast.Name(name):
            return _name(name, function, owner)
        case ast.Attribute(value, name):
            holder = callee_of(value, function, owner)
            return UNKNOWN if holder is UNKNOWN else _attribute(holder, name)
        case _:
            return UNKNOWN


def _name(name: str, function: FunctionType, owner: object) -> object:
    code = function.__code__
    if name in code.co_varnames or name in code.co_cellvars:
        own = code.co_argcount > 0 and name == code.co_varnames[0] and owner is not None
        return owner if own else UNKNOWN
    if name in code.co_freevars:
        cell = (function.__closure__ or ())[code.co_freevars.index(name)]
        try:
            return cell.cell_contents
        except ValueError:
            return UNKNOWN
    return function.__globals__.get(name, getattr(builtins, name, UNKNOWN))


def _attribute(holder: object, name: str) -> object:
    """An attribute, without running code of the holder: neither properties nor `__getattr__`."""
    if isinstance(holder, torch.nn.Module):
        children = cast("dict[str, object]", vars(holder)["_modules"])
        if name in children:
            return children[name]
    found = inspect.getattr_static(holder, name, UNKNOWN)
    match found:
        case staticmethod():
            return found.__func__
        case classmethod():
            return MethodType(found.__func__, holder if isinstance(holder, type) else type(holder))
        case FunctionType():
            mine = isinstance(holder, type | ModuleType) or name in getattr(holder, "__dict__", {})
            return found if mine else MethodType(found, holder)
        case _:
            return UNKNOWN if hasattr(type(found), "__set__") or isinstance(found, torch.Tensor) else found
