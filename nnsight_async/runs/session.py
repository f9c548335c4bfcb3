"""Several traces, of which later ones use what earlier ones have bound."""

from __future__ import annotations

from contextvars import ContextVar, Token
from types import TracebackType
from typing import Self

from nnsight_async.runs.body import check_awaiting_allowed, check_blocking_allowed

FORM = "with model.session()"
_open: ContextVar[tuple[object, ...]] = ContextVar("nnsight_sessions", default=())


class Session:
    """The context manager that `model.session()` returns. Its body runs as it stands, one trace after the other.

    Traces of the model in it wait for their runs, with `with` and `async with` alike. After them names hold values,
    also those that the block did not save, where the code around reads them.
    """

    def __init__(self, model: object, asynchronous: bool) -> None:
        self._model = model
        self._asynchronous = asynchronous
        self._entered: Token[tuple[object, ...]] | None = None

    def __enter__(self) -> Self:
        check_blocking_allowed(self._asynchronous, FORM)
        return self._enter()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()

    async def __aenter__(self) -> Self:
        check_awaiting_allowed(self._asynchronous, FORM)
        return self._enter()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()

    def _enter(self) -> Self:
        if self._entered is not None:
            raise RuntimeError("this session is open: call model.session() for another one")
        self._entered = _open.set((*_open.get(), self._model))
        return self

    def _leave(self) -> None:
        entered, self._entered = self._entered, None
        if entered is not None:
            _open.reset(entered)


def in_session(model: object) -> bool:
    """Whether this task, or thread, is in a session of `model`."""
    return any(model is other for other in _open.get())
