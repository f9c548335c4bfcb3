"""Exceptions of a block, on their way from the worker to the caller."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
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


class _Place(msgspec.Struct, array_like=True):
    filename: str
    line: int
    function: str


class _Failure(msgspec.Struct, array_like=True):
    kind: str
    message: str
    places: list[_Place]
    notes: list[str]
    pickled: bytes | None
    cause: _Failure | None = None
    context: _Failure | None = None


def pack(error: BaseException, note: str, stood: Sequence[Place] = ()) -> bytes:
    """The exception as bytes: its type, message, chain, and the block's part of its traceback. Never raises.

    `stood` is where the block waited, for an exception that was not raised in it.
    """
    try:
        failure = _packed(error, LINKS)
    except Exception:  # code of the user's own class raised
        failure = _Failure(type(error).__qualname__, _text(error), [], [], None)
    failure.notes += [*_hints(error), note]
    failure.places = failure.places or [_Place(*place) for place in _users(stood)]
    return msgspec.msgpack.encode(failure)


def unpack(packed: bytes, beginning: Place | None = None) -> BaseException:
    """The exception, with a traceback whose last lines are the user's own: those where its block begins, at least."""
    failure = msgspec.msgpack.decode(packed, type=_Failure)
    if not failure.places and beginning is not None:
        failure.places = [_Place(*beginning)]
    return _unpacked(failure)


def _packed(error: BaseException, links: int) -> _Failure:
    cause = error.__cause__ if links else None
    context = error.__context__ if links and not error.__suppress_context__ else None
    return _Failure(
        kind=type(error).__qualname__,
        message=_text(error),
        places=[_Place(*place) for place in _places(error)],
        notes=[_sendable(str(note)) for note in getattr(error, "__notes__", [])],
        pickled=exceptions.dumps(error),
        cause=None if cause is None else _packed(cause, links - 1),
        context=None if context is None else _packed(context, links - 1),
    )


def _unpacked(failure: _Failure) -> BaseException:
    error = _raisable(failure)
    for note in failure.notes:
        error.add_note(note)
    if failure.context is not None:
        error.__context__ = _unpacked(failure.context)
    if failure.cause is not None:
        error.__cause__ = _unpacked(failure.cause)
    return error.with_traceback(_traceback(failure.places))


def _raisable(failure: _Failure) -> BaseException:
    """The exception, unless it would mean something to the caller's own code, which did not exit or get cancelled."""
    error = None if failure.pickled is None else exceptions.loads(failure.pickled)
    if isinstance(error, Exception) and not isinstance(error, (StopIteration, StopAsyncIteration)):
        return error
    stands_in = BlockError(f"{failure.kind}: {failure.message}" if failure.message else failure.kind)
    if error is not None:
        stands_in.__cause__ = error
    return stands_in


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


def _text(error: BaseException) -> str:
    try:
        return _sendable(str(error))
    except Exception:
        return f"<{type(error).__name__} whose message cannot be shown>"


def _sendable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _traceback(places: list[_Place]) -> TracebackType | None:
    """A traceback through `places`, made of frames that stand at those files and lines.

    They are made in a greenlet, whose frames know nothing of the caller's: an exception must not keep alive all that
    the engine's loop was holding when it came.
    """
    return greenlet.greenlet(_linked).switch(places)


def _linked(places: list[_Place]) -> TracebackType | None:
    found: TracebackType | None = None
    for place in reversed(places):
        found = _link(place, found)
    return found


def _link(place: _Place, following: TracebackType | None) -> TracebackType | None:
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
