"""Exceptions of a block, on their way from the worker to the caller."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

import greenlet
import msgspec

from nnsight_async.errors import BlockError
from nnsight_async.runs import exceptions

LINKS = 8
"""How many exceptions of a chain (`raise ... from ...`) travel."""

FRAMES = 30

GRADIENTS = (
    "vLLM computes without gradients; TransformersModel takes them, where the text of a block shows that it does so "
    "(backward, grad) or the trace is given gradients=True"
)

_GRADIENTS = ("does not require grad", "requires_grad=False", "cannot be saved for backward")
"""How PyTorch says that something was computed without gradients."""

Place = tuple[str, int, str]
"""Where code stands: a file, a line, and the name of the function."""


class Stand(msgspec.Struct, array_like=True):
    filename: str
    line: int
    function: str


class Failure(msgspec.Struct, array_like=True):
    """An exception as data. `pickled` is for who trusts where it comes from (others: `runs/carried.py`)."""

    kind: str
    message: str
    places: list[Stand]
    notes: list[str]
    pickled: bytes | None
    cause: Failure | None = None
    context: Failure | None = None
    module: str = ""
    args: list[Any] | None = None
    """What it was raised with, if that is plain data."""


def pack(error: BaseException, note: str, stood: Sequence[Place] = ()) -> bytes:
    """The exception as bytes: its type, message, chain, and the block's part of its traceback. Never raises.

    `stood` is where the block waited, for an exception that was not raised in it.
    """
    try:
        failure = _packed(error, LINKS)
    except Exception:  # code of the user's own class raised
        failure = Failure(type(error).__qualname__, text_of(error), [], [], None)
    failure.notes += [*_hints(error), note]
    failure.places = failure.places or [Stand(*place) for place in _users(stood)]
    return msgspec.msgpack.encode(failure)


def unpack(packed: bytes, beginning: Place | None = None) -> BaseException:
    """The exception, with a traceback whose last lines are the user's own: those where its block begins, at least."""
    failure = msgspec.msgpack.decode(packed, type=Failure)
    if not failure.places and beginning is not None:
        failure.places = [Stand(*beginning)]
    return unpacked(failure, _raisable)


def _packed(error: BaseException, links: int) -> Failure:
    cause = error.__cause__ if links else None
    context = error.__context__ if links and not error.__suppress_context__ else None
    return Failure(
        kind=type(error).__qualname__,
        message=text_of(error),
        places=[Stand(*place) for place in _places(error)],
        notes=[_sendable(str(note)) for note in getattr(error, "__notes__", [])],
        pickled=exceptions.dumps(error),
        module=type(error).__module__,
        args=plain_args(error),
        cause=None if cause is None else _packed(cause, links - 1),
        context=None if context is None else _packed(context, links - 1),
    )


def plain_args(error: BaseException) -> list[Any] | None:
    """The arguments of an exception, where all are plain data."""
    given = error.__reduce__()[1] if isinstance(error, OSError) else error.args  # whose file name is not among them
    args = [_sendable(arg) if type(arg) is str else arg for arg in given]
    whole = [arg for arg in args if type(arg) is int]
    plain = all(arg is None or type(arg) in (bool, int, float, str, bytes) for arg in args)
    return args if plain and all(arg.bit_length() < 64 for arg in whole) else None


def unpacked(failure: Failure, raisable: Callable[[Failure], BaseException]) -> BaseException:
    """The exception that `raisable` makes, with its notes, chain and traceback."""
    error = raisable(failure)
    for note in failure.notes:
        error.add_note(note)
    if failure.context is not None:
        error.__context__ = unpacked(failure.context, raisable)
    if failure.cause is not None:
        error.__cause__ = unpacked(failure.cause, raisable)
    return error.with_traceback(_traceback(failure.places))


def _raisable(failure: Failure) -> BaseException:
    """The exception, unless it would mean something to the caller's own code, which did not exit or get cancelled."""
    error = None if failure.pickled is None else exceptions.loads(failure.pickled)
    if isinstance(error, Exception) and not isinstance(error, (StopIteration, StopAsyncIteration)):
        return error
    stands_in = stand_in(failure)
    if error is not None:
        stands_in.__cause__ = error
    return stands_in


def stand_in(failure: Failure) -> BlockError:
    """What says what cannot be raised here."""
    return BlockError(f"{failure.kind}: {failure.message}" if failure.message else failure.kind)


def _places(error: BaseException) -> list[Place]:
    frames = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=False)
    return _users([(frame.filename, frame.lineno or 1, frame.name) for frame in frames])


def _hints(error: BaseException) -> list[str]:
    """What PyTorch cannot know: what `value.sav()` may have meant, and who computes with gradients."""
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _GRADIENTS):
        return [GRADIENTS]
    name: object = error.name if type(error) is AttributeError else None
    if name == "save":
        return ["`.save()` is understood in the text of a block; where code has no text, write save(value)"]
    return ["did you mean .save()?"] if isinstance(name, str) and get_close_matches(name, ["save"], 1, 0.7) else []


def _users(places: Sequence[Place]) -> list[Place]:
    """From the block's first line to the last that is the user's: neither ours nor below what the user called."""
    start, stop = 0, len(places)
    while start < stop and _is_ours(places[start][0]):
        start += 1
    while stop > start and places[stop - 1][0].startswith(_LIBRARIES):
        stop -= 1
    return list(places[max(start, stop - FRAMES) : stop])


def _is_ours(filename: str) -> bool:
    return filename.startswith(_PACKAGE)


def _folder(module: str) -> str:
    spec = find_spec(module)
    return f"{Path(spec.origin).parent}/" if spec is not None and spec.origin else "//"


_PACKAGE = _folder("nnsight_async")
_LIBRARIES = (_PACKAGE, _folder("torch"), _folder("transformers"), _folder("vllm"))


def text_of(error: BaseException) -> str:
    """Its message, whatever its class makes of it."""
    try:
        return _sendable(str(error))
    except Exception:
        return f"<{type(error).__name__} whose message cannot be shown>"


def _sendable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _traceback(places: list[Stand]) -> TracebackType | None:
    """A traceback through `places`, made of frames that stand at those files and lines.

    They are made in a greenlet, whose frames know nothing of the caller's: an exception must not keep alive all that
    the engine's loop was holding when it came.
    """
    return greenlet.greenlet(_linked).switch(places)


def _linked(places: list[Stand]) -> TracebackType | None:
    found: TracebackType | None = None
    for place in reversed(places):
        found = _link(place, found)
    return found


def _link(place: Stand, following: TracebackType | None) -> TracebackType | None:
    source = "\n" * (place.line - 1) + "raise ZeroDivisionError"
    code: CodeType = compile(source, place.filename, "exec").replace(co_name=place.function, co_qualname=place.function)
    try:
        exec(code, {})
    except ZeroDivisionError as error:
        made = error.__traceback__.tb_next if error.__traceback__ else None
        if made is not None:
            return TracebackType(following, made.tb_frame, made.tb_lasti, place.line)
    return following


def describe(prompt: Any) -> str:
    """A prompt in few words, for the notes of its run's exception."""
    told = prompt.get("prompt") or prompt.get("prompt_token_ids") or "given as embeddings"
    text = repr(told)
    unit = "characters" if isinstance(told, str) else "tokens"
    return text if len(text) <= 80 else f"{text[:60]} ... ({len(told)} {unit})"
