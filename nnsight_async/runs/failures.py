"""Exceptions of a block, on their way from the worker to the caller."""

from __future__ import annotations

import pickle
import traceback
from types import CodeType, TracebackType
from typing import Any

import cloudpickle
import msgspec

from nnsight_async.errors import BlockError


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


def pack(error: BaseException, note: str) -> bytes:
    """The exception as bytes: its type, message and the block's part of its traceback. Never raises."""
    places = [_Place(frame.filename, frame.lineno or 1, frame.name) for frame in _own(error)]
    notes = [str(existing) for existing in getattr(error, "__notes__", [])]
    failure = _Failure(type(error).__qualname__, _text(error), places, [*notes, note], _pickled(error))
    return msgspec.msgpack.encode(failure)


def unpack(packed: bytes) -> BaseException:
    """The exception, with a traceback whose last lines are the user's own."""
    failure = msgspec.msgpack.decode(packed, type=_Failure)
    error = _rebuilt(failure)
    for note in failure.notes:
        error.add_note(note)
    return error.with_traceback(_traceback(failure.places))


def _own(error: BaseException) -> list[traceback.FrameSummary]:
    """Frames from the block's first one on, without ours below the user's last line when the error is one of ours."""
    frames = traceback.extract_tb(error.__traceback__, limit=None)
    start = 1 if len(frames) > 1 else 0
    frames = frames[start:]
    while len(frames) > 1 and _is_ours(frames[-1].filename):
        frames.pop()
    return list(frames)[-30:]


def _is_ours(filename: str) -> bool:
    return filename.startswith(_PACKAGE) and "/testing/" not in filename


_PACKAGE = __file__.rsplit("/", 2)[0] + "/"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return f"<{type(error).__name__} whose message cannot be shown>"


def _pickled(error: BaseException) -> bytes | None:
    """The exception itself, if it survives the trip (checked here, where a failure can still be handled)."""
    try:
        bare = cloudpickle.dumps(_without_traceback(error))
        pickle.loads(bare)
    except BaseException:
        return None
    return bare


def _without_traceback(error: BaseException) -> BaseException:
    error.__context__ = error.__cause__ = None
    if hasattr(error, "__notes__"):
        del error.__notes__
    return error


def _rebuilt(failure: _Failure) -> BaseException:
    if failure.pickled is not None:
        try:
            error: Any = pickle.loads(failure.pickled)
        except Exception:
            error = None
        if isinstance(error, BaseException):
            return error
    return BlockError(f"{failure.kind}: {failure.message}")


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
