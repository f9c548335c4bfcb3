from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from functools import partial
from types import FunctionType, MethodType
from typing import Any, cast

from nnsight_async.capture.block import Block
from nnsight_async.capture.compile import attribute_names
from nnsight_async.capture.diagnose import shipping_error
from nnsight_async.capture.load import VERSION
from nnsight_async.capture.plain import PLAIN
from nnsight_async.capture.recompile import plain_of, recompiled, with_code
from nnsight_async.capture.ship import Pickled, Unshippable, dumps
from nnsight_async.errors import CaptureError

Probe = Callable[[Any, Any], object]


def from_function(probe: Probe, owners: Collection[object] | None = None) -> Block:
    """A block from a function of (model, tracer), a method, a partial or a callable object.

    `owners` are the model that it will run on and the tracers that its code may use.

    Raises `TypeError` if it cannot be called with two arguments, `CaptureError` if it is asynchronous or a generator,
    `ShippingError` if it uses a value that cannot travel.
    """
    if not callable(probe):
        raise TypeError(f"a probe is a function of (model, tracer), not {probe!r}")
    function = _function(probe)
    _check_kind(probe, function)
    _check_arguments(probe)
    names: tuple[str, ...] = ()
    prepared: object = probe
    if function is not None:
        rewritten, names = recompiled(function, named=True)
        copy = with_code(rewritten, rewritten.__code__)
        if isinstance(probe, FunctionType) and (forms := plain_of(function)) is not None:
            setattr(copy, PLAIN, forms)
        prepared = _around(probe, copy)
    pickled = _dumps(prepared, function, owners)
    return Block(
        payload=VERSION + pickled.payload,
        names=names,
        filename=function.__code__.co_filename if function is not None else "<unknown>",
        first_line=function.__code__.co_firstlineno if function is not None else 0,
        function=_name(probe),
        constants=pickled.constants,
    )


def _function(probe: object) -> FunctionType | None:
    """The Python function that runs when `probe` is called, or None."""
    match probe:
        case FunctionType():
            return probe
        case MethodType():
            return _function(probe.__func__)
        case functools.partial():
            return _function(cast("object", probe.func))
        case type():
            return None
        case _:
            called = getattr(type(probe), "__call__", None)  # noqa: B004 -- the function, not the question
            return called if isinstance(called, FunctionType) else None


def _around(probe: Any, function: FunctionType) -> object:
    """`probe` with `function` in the place of the function it runs."""
    match probe:
        case FunctionType():
            return function
        case MethodType():
            return MethodType(function, probe.__self__)
        case functools.partial():
            return functools.partial(cast("Probe", _around(probe.func, function)), *probe.args, **probe.keywords)
        case _:
            return MethodType(function, probe)


def _check_kind(probe: object, function: FunctionType | None) -> None:
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise CaptureError(
            f"{_name(probe)} is an async function, and no event loop runs in the worker: write it with `def`, and "
            "await what it needs before the run"
        )
    if inspect.isgeneratorfunction(function):
        raise CaptureError(
            f"{_name(probe)} is a generator function: save values with .save() instead of yielding them; "
            "tracer.stream() yields them step by step"
        )


def _check_arguments(probe: Probe) -> None:
    try:
        signature = inspect.signature(probe)
    except ValueError:  # some builtins have none
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise TypeError(
            f"a probe is called as {_name(probe)}(model, tracer), and its signature is {signature}: {error}. "
            "Give further arguments with functools.partial or a closure."
        ) from None


def _dumps(prepared: object, function: FunctionType | None, owners: Collection[object] | None) -> Pickled:
    attributes = attribute_names(function.__code__) if function is not None else frozenset[str]()
    dump = partial(dumps, attributes=attributes, owners=owners)
    try:
        return dump(prepared)
    except Unshippable as failure:
        if function is None:
            raise shipping_error({"probe": prepared}, dump, "<unknown>", {}, failure) from failure.__cause__
        error = shipping_error(
            _values(prepared, function), dump, function.__code__.co_filename, _lines(function), failure
        )
        raise error from failure.__cause__


def _values(prepared: object, function: FunctionType) -> dict[str, object]:
    """What the function uses, by the names under which its author knows them."""
    seen = inspect.getclosurevars(function)
    values: dict[str, object] = {**seen.nonlocals, **seen.globals}
    values.update((f"default {n}", value) for n, value in enumerate(function.__defaults__ or ()))
    owner = getattr(prepared, "__self__", None)
    if owner is not None:
        values["self"] = owner
    values[function.__name__] = prepared
    return values


def _lines(function: FunctionType) -> dict[str, int]:
    code = function.__code__
    return dict.fromkeys(_values(None, function), code.co_firstlineno)


def _name(probe: object) -> str:
    if isinstance(probe, functools.partial):
        return _name(cast("object", probe.func))
    return getattr(probe, "__qualname__", None) or type(probe).__qualname__
