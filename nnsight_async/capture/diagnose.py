"""Which variable keeps a block from travelling, and what to do about it."""

from __future__ import annotations

import asyncio
import io
import socket
import threading
from collections import deque
from types import AsyncGeneratorType, CoroutineType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from nnsight_async.capture.compile import attribute_names
from nnsight_async.capture.ship import Unshippable
from nnsight_async.capture.userland import is_user_module
from nnsight_async.errors import ShippingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event, threading.Semaphore)
_ADVICE: tuple[tuple[tuple[type, ...], str], ...] = (
    (_LOCKS, "a lock holds only in its own process; create one inside the block if the block needs it"),
    ((io.IOBase,), "read the file above the block and use its contents, or open it inside the block"),
    (
        (socket.socket,),
        "a connection belongs to its process; receive above the block, or send what the block saved after it",
    ),
    ((GeneratorType, AsyncGeneratorType), "make it a list above the block"),
    ((CoroutineType, asyncio.Future), "await it above the block and use the result"),
    (
        (asyncio.AbstractEventLoop,),
        "no event loop runs in the worker; do the asynchronous part above or after the block",
    ),
    ((FrameType,), "take the values you need out of the frame above the block"),
)
_DEPTH = 6
_BREADTH = 10_000


def shipping_error(
    values: Mapping[str, object],
    dump: Callable[[object], object],
    filename: str,
    lines: Mapping[str, int],
    fallback: Unshippable,
) -> ShippingError:
    """The error for the first of `values` that cannot be pickled alone."""
    for name, value in values.items():
        try:
            dump(value)
        except Unshippable as failure:
            return _error(name, value, failure, filename, lines.get(name))
    return _error("a value", None, fallback, filename, None)


def _error(name: str, value: object, failure: Unshippable, filename: str, line: int | None) -> ShippingError:
    culprit = failure.culprit
    where = f"{filename}, line {line}" if line else filename
    path = _path(name, value, culprit)
    holds = "" if value is culprit else f" ({path} is {_kind(culprit)})" if path else f" (it holds {_kind(culprit)})"
    what = _kind(value) if value is culprit or value is not None else "a value"
    return ShippingError(
        f"{where}: the block uses {name!r}, {what}{holds}, which cannot travel to the worker: {failure.__cause__}.\n"
        f"    What to do: {_advice(culprit, path or name, nested=value is not culprit)}."
    )


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _advice(culprit: object, path: str, *, nested: bool) -> str:
    general = "bind the part that the block needs to a name above the block, and use that name"
    given: Any = getattr(type(culprit), "__block_advice__", None)
    advice = given or next((advice for types, advice in _ADVICE if isinstance(culprit, types)), general)
    if nested:
        advice += f"; or keep {path} out by binding only what the block needs to a name above it"
    return advice


def _path(name: str, value: object, culprit: object) -> str | None:
    """How to write `culprit`, starting from the variable."""
    seen, queue = {id(value)}, deque([(name, value, 0)])
    while queue and len(seen) < _BREADTH:
        path, here, depth = queue.popleft()
        if here is culprit:
            return path
        if depth < _DEPTH:
            for step, child in _children(here):
                if id(child) not in seen:
                    seen.add(id(child))
                    queue.append((step.format(path), child, depth + 1))
    return None


def _children(value: Any) -> Iterator[tuple[str, object]]:
    """(how to write it with {} for the parent, the part)."""
    match value:
        case dict():
            yield from ((f"{{}}[{_escaped(key)}]", part) for key, part in value.items())
        case list() | tuple():
            yield from ((f"{{}}[{index}]", part) for index, part in enumerate(value))
        case set() | frozenset():
            yield from (("an element of {}", part) for part in value)
        case FunctionType():
            yield from _names_of(value)
        case MethodType():
            yield from (("{}.__self__", value.__self__), ("{}.__func__", value.__func__))
        case ModuleType() if not is_user_module(value.__name__):
            return
        case _:
            names = getattr(value, "__dict__", {})
            yield from ((f"{{}}.{name}", part) for name, part in dict(names).items())


def _names_of(function: FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{name} in {{}}", cell.cell_contents
        except ValueError:  # an empty cell
            continue
    for name in sorted(attribute_names(function.__code__) & function.__globals__.keys()):
        yield f"{name} in {{}}", function.__globals__[name]


def _escaped(key: object) -> str:
    return repr(key).replace("{", "{{").replace("}", "}}")
