"""Exceptions between processes that do not trust each other: rebuilt by name, of classes that both have.

What `failures.pack` makes has a pickle in it, for one owner's processes. Here it is taken out before it leaves, and
never looked at where it comes from elsewhere.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from nnsight_async.errors import NNsightError
from nnsight_async.runs.failures import FRAMES, LINKS, Failure, Place, Stand, plain_args, stand_in, text_of, unpacked

LATEST = 1_000_000
"""The last line that a traceback may lead to: a frame at a line is made of text with as many."""
MOST_TEXT = 1 << 16

_CONTROL = (StopIteration, StopAsyncIteration, ExceptionGroup)
"""Which mean something to the caller's own code, or hold others."""


def carried(packed: bytes, keep: Callable[[str], bool]) -> bytes:
    """What `failures.pack` made, without what must not travel: its pickle, and places that `keep` is against."""
    failure = msgspec.msgpack.decode(packed, type=Failure)
    _strip(failure, keep)
    return msgspec.msgpack.encode(failure)


def carry(error: BaseException) -> bytes:
    """An exception of this process, without its traceback, which is nobody else's business."""
    kind = next((kind for kind in type(error).__mro__ if (kind.__module__, kind.__qualname__) in known()), type(error))
    return msgspec.msgpack.encode(
        Failure(
            kind=kind.__qualname__,
            message=text_of(error),
            places=[],
            notes=[str(note) for note in getattr(error, "__notes__", [])],
            pickled=None,
            module=kind.__module__,
            args=plain_args(error),
        )
    )


def rebuilt(packed: bytes, beginning: Place | None = None, renamed: Callable[[str], str] = str) -> BaseException:
    """The exception, or a `BlockError` that says what it was; nothing of it is unpickled.

    `ValueError` for bytes that are none. `renamed` gives the real name of a file.
    """
    try:
        failure = msgspec.msgpack.decode(packed, type=Failure)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"a malformed error: {error}") from None
    if not failure.places and beginning is not None:
        failure.places = [Stand(*beginning)]
    return unpacked(_limited(failure, renamed, LINKS), _raisable)


def named(kind: str, message: str) -> BaseException:
    """The exception of a built-in class or one of ours, by the name of the class alone."""
    found = next((each for (_, name), each in known().items() if name == kind), None)
    failure = Failure(kind, message, [], [], None, module=found.__module__ if found else "", args=[message])
    return _raisable(failure)


def known() -> dict[tuple[str, str], type[Exception]]:
    """The classes that are rebuilt: built-in ones and ours."""
    built_in = [kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    ours = [kind for kind in _below(NNsightError) if kind.__module__.startswith("nnsight_async.")]
    kinds = [kind for kind in (*built_in, *ours) if not issubclass(kind, _CONTROL)]
    return {(kind.__module__, kind.__qualname__): kind for kind in kinds}


def _below(kind: type[Exception]) -> Iterator[type[Exception]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _below(child)


def _raisable(failure: Failure) -> BaseException:
    kind = known().get((failure.module, failure.kind))
    for args in (failure.args, [failure.message]):
        error = None if kind is None or args is None else _made(kind, args)
        if error is not None and str(error) == failure.message:
            return error
    return stand_in(failure)


def _made(kind: type[Exception], args: list[Any]) -> Exception | None:
    try:
        return kind(*args)
    except Exception:  # of whatever kind: these are not the arguments that it takes
        return None


def _strip(failure: Failure, keep: Callable[[str], bool]) -> None:
    failure.pickled = None
    failure.places = [place for place in failure.places if keep(place.filename)]
    for other in (failure.cause, failure.context):
        if other is not None:
            _strip(other, keep)


def _limited(failure: Failure, renamed: Callable[[str], str], links: int) -> Failure:
    """With no more than a traceback can be made of."""
    places = [place for place in failure.places[-FRAMES:] if 0 < place.line <= LATEST]
    return Failure(
        kind=failure.kind[:MOST_TEXT],
        message=failure.message,
        places=[Stand(renamed(place.filename), place.line, place.function) for place in places if _is_name(place)],
        notes=failure.notes[:FRAMES],
        pickled=None,
        cause=None if failure.cause is None or not links else _limited(failure.cause, renamed, links - 1),
        context=None if failure.context is None or not links else _limited(failure.context, renamed, links - 1),
        module=failure.module,
        args=failure.args,
    )


def _is_name(place: Stand) -> bool:
    return "\0" not in place.filename and "\0" not in place.function
