"""Prompts of a map, taken one by one from what the user gave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Iterable, Sized
from contextlib import suppress
from typing import Any, Protocol

NOTHING: Any = object()


class Prompts(Protocol):
    """Where prompts come from."""

    exhausted: bool

    @property
    def open(self) -> bool:
        """Whether `take` can be asked now."""
        ...

    def take(self) -> Any:
        """The next prompt, or NOTHING if there is none or not yet."""
        ...

    def close(self) -> None:
        """Take no more."""
        ...


def prompts_of(given: Any, tell: Callable[[], None]) -> Prompts:
    """Prompts from an iterable or an async one, which calls `tell` when it is to be asked again."""
    if isinstance(given, (str, bytes)):
        raise ValueError("map() takes several prompts: put the one in a list, or use model.run(prompt, probe)")
    if isinstance(given, AsyncIterable):
        return AsyncPrompts(given, tell)
    if isinstance(given, Iterable):
        return PlainPrompts(given)
    raise TypeError(f"map() takes an iterable of prompts, or an async one, not a {type(given).__name__}")


def length(given: Any) -> int | None:
    """How many prompts there are, if that is known."""
    return len(given) if isinstance(given, Sized) else None


class PlainPrompts:
    """Prompts of an ordinary iterable."""

    def __init__(self, prompts: Iterable[Any]) -> None:
        self._iterator = iter(prompts)
        self.exhausted = False

    @property
    def open(self) -> bool:
        return not self.exhausted

    def take(self) -> Any:
        prompt = next(self._iterator, NOTHING)
        self.exhausted = prompt is NOTHING
        return prompt

    def close(self) -> None:
        self.exhausted = True


class AsyncPrompts:
    """Prompts of an async iterable: the next one is waited for while results are handed out."""

    def __init__(self, prompts: AsyncIterable[Any], tell: Callable[[], None]) -> None:
        self._iterator = aiter(prompts)
        self._tell = tell
        self._coming: asyncio.Future[Any] | None = None
        self.exhausted = False

    @property
    def open(self) -> bool:
        return not self.exhausted and (self._coming is None or self._coming.done())

    def take(self) -> Any:
        if self._coming is None:
            self._coming = asyncio.ensure_future(anext(self._iterator, NOTHING))
            self._coming.add_done_callback(lambda _: self._tell())
            return NOTHING
        coming, self._coming = self._coming, None
        prompt = coming.result()
        self.exhausted = prompt is NOTHING
        return prompt

    def close(self) -> None:
        self.exhausted = True
        if self._coming is not None:
            with suppress(RuntimeError):  # its loop is closed
                self._coming.cancel()
