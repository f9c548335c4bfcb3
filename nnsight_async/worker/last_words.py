"""What a process of vLLM ended with, left where the client finds it: vLLM itself tells it only that one has ended."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

HOME = "NNSIGHT_ASYNC_HOME"
"""Environment variable with the folder of the engine: the inbox's socket, and these words."""

P = ParamSpec("P")
R = TypeVar("R")


def leave(words: str, home: str | None = None) -> None:
    """Write `words` down, unless another process of the engine was first: what it said is the cause."""
    home = home or os.environ.get(HOME)
    if home is not None:
        with suppress(OSError), (_file(Path(home))).open("x") as file:
            file.write(words)


def read(home: Path) -> str | None:
    """What the first process to fail has left in `home`."""
    try:
        return _file(home).read_text() or None
    except OSError:
        return None


def clear(home: Path) -> None:
    """Forget what was left: the engine has started all the same."""
    _file(home).unlink(missing_ok=True)


def spoken(function: Callable[P, R]) -> Callable[P, R]:
    """The function, leaving the exceptions that it raises."""

    @functools.wraps(function)
    def entered(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            leave(words_of(error))
            raise

    return entered


def words_of(error: BaseException) -> str:
    """Class and message of an exception, and of the one that it was raised from."""
    words = f"{type(error).__name__}: {essence(error)}".removesuffix(": ")
    return words if error.__cause__ is None else f"{words} (from {words_of(error.__cause__)})"


def essence(error: BaseException) -> str:
    """The message of an exception, without pydantic's frame around it."""
    errors = getattr(error, "errors", None)
    if not callable(errors):
        return str(error)
    details = cast("list[dict[str, Any]]", errors())
    return "; ".join(str(detail["msg"]).removeprefix("Value error, ") for detail in details)


def _file(home: Path) -> Path:
    return home / "last_words"
