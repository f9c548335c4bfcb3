"""Exceptions as bytes, of the very class that the caller knows."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
from cloudpickle import cloudpickle as internals

# cloudpickle 3 numbers the classes that it takes by value, and finds the one it has under a number again.
_internals: Any = internals
_number: Callable[[type], str] = _internals._get_or_create_tracker_id
_by_number: Any = _internals._DYNAMIC_CLASS_TRACKER_BY_ID
_is_importable: Callable[[type], bool] = _internals._should_pickle_by_reference


def dumps(error: BaseException) -> bytes | None:
    """The exception without its traceback and chain; None if neither it nor its parts survive the trip."""
    for form in (_whole, _in_parts):
        try:
            pickled = _dumps(form(error))
            if _text(loads(pickled)) == _text(error):
                return pickled
        except BaseException:
            continue
    return None


def loads(pickled: bytes) -> BaseException | None:
    """The exception, or None if its class is not to be had in this process."""
    try:
        whole, parts = pickle.loads(pickled)
        return whole if parts is None else _built(*parts)
    except Exception:
        return None


def _whole(error: BaseException) -> tuple[Any, Any]:
    reduced = error.__reduce__()
    if isinstance(reduced, str) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return error, None
    return _Reduced((*reduced[:2], _without_notes(reduced[2]), *reduced[3:])), None


def _in_parts(error: BaseException) -> tuple[Any, Any]:
    """For classes whose `__init__` does not take `args` again."""
    return None, (type(error), error.args, _without_notes(error.__dict__))


def _without_notes(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != "__notes__"}


def _built(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = BaseException.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def _text(error: BaseException | None) -> str | None:
    try:
        return None if error is None else f"{type(error).__qualname__}: {error}"
    except Exception:
        return type(error).__qualname__


class _Reduced:
    """Pickles as what an exception's `__reduce__` gave."""

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self._parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return self._parts


def _dumps(value: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and not _is_importable(obj):
            return _known, (_number(obj), cloudpickle.dumps(obj))
        return super().reducer_override(obj)


def _known(number: str, by_value: bytes) -> type:
    """The class itself where it comes from (unpickling it by value would overwrite it there), else a copy."""
    found = _by_number.get(number)
    return pickle.loads(by_value) if found is None else found
