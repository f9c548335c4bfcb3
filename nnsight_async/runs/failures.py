"""Exceptions of a block, on their way from the worker to the caller."""

from __future__ import annotations

import traceback
from types import CodeType, TracebackType
from typing import Any

import msgspec

from nnsight_async.errors import BlockError
from nnsight_async.runs import exceptions

LINKS = 8
"""How many exceptions of a chain (`raise ... from ...`) travel."""

FRAMES = 30


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


def pack(error: BaseException, note: str) -> bytes:
    """The exception as bytes: its type, message, chain, and the block's part of its traceback. Never raises."""
    try:
        failure = _packed(error, LINKS)
    except Exception:  # code of the user's own class raised
        failure = _Failure(type(error).__qualname__, _text(error), [], [], None)
    failure.notes.append(note)
    return msgspec.msgpack.encode(failure)


def unpack(packed: bytes) -> BaseException:
    """The exception, with a traceback whose last lines are the user's own."""
    return _unpacked(msgspec.msgpack.decode(packed, type=_Failure))


def _packed(error: BaseException, links: int) -> _Failure:
    cause = error.__cause__ if links else None
    context = error.__context__ if links and not error.__suppress_context__ else None
    return _Failure(
        kind=type(error).__qualname__,
        message=_text(error),
        places=[_Place(frame.filename, frame.lineno or 1, frame.name) for frame in _own(error)],
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


def _own(error: BaseException) -> list[traceback.FrameSummary]:
    """Frames from the block's first one on, without ours below the user's last line when the error is one of ours."""
    frames = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=False)
    start = 0
    while start < len(frames) - 1 and _is_ours(frames[start].filename):
        start += 1
    stop = len(frames)
    while stop > start + 1 and _is_ours(frames[stop - 1].filename):
        stop -= 1
    return frames[max(start, stop - FRAMES) : stop]


def _is_ours(filename: str) -> bool:
    return filename.startswith(_PACKAGE) and "/testing/" not in filename


_PACKAGE = __file__.rsplit("/", 2)[0] + "/"


def _text(error: BaseException) -> str:
    try:
        return _sendable(str(error))
    except Exception:
        return f"<{type(error).__name__} whose message cannot be shown>"


def _sendable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _traceback(places: list[_Place]) -> TracebackType | None:
    """A traceback through `places`, made of frames that stand at those files and lines."""
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
