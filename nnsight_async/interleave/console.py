"""What a block prints and warns of, kept to be sent home."""

from __future__ import annotations

import io
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

from nnsight_async.interleave.context import running

_PACKAGE = f"{Path(__file__).parents[1]}/"

Warned = tuple[str, str, str, int]
"""A warning raised in a block: its category by name, its message, file and line."""


REPLACED = (
    "what is saved here is bound to no name, and replaces what this step has saved under the same text, {!r}: assign "
    'it to a name in the block, give it one with save(value, "name"), or append it to a list that was saved once, '
    "`values = save([])`"
)


class Console(io.TextIOBase):
    """Stands in for `sys.stdout` while a block runs."""

    def __init__(self) -> None:
        super().__init__()
        self._printed: list[str] = []
        self.warned: list[Warned] = []

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._printed.append(text)
        return len(text)

    def take(self) -> tuple[str, list[Warned]]:
        """What has come since the last call."""
        if not self._printed and not self.warned:
            return "", []
        text = sendable("".join(self._printed))
        warned = [(name, sendable(message), filename, line) for name, message, filename, line in self.warned]
        self._printed, self.warned = [], []
        return text, warned


def sendable(text: str) -> str:
    """The text with what UTF-8 cannot carry replaced."""
    return text.encode("utf-8", "backslashreplace").decode()


def keep_warnings() -> None:
    """From here on, warnings raised in a block go to its console; all others go where they went."""
    show = warnings.showwarning

    def showwarning(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        block = running()
        if block is None:
            show(message, category, filename, lineno, file, line)
        else:
            name = f"{category.__module__}.{category.__qualname__}"
            block.console.warned.append((name, str(message), filename, lineno))

    warnings.showwarning = showwarning


def warn(message: str) -> None:
    """Warn of what the nearest line of the block does that is not in this package."""
    frame: FrameType = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_code.co_filename.startswith(_PACKAGE) and frame.f_back is not None:
        frame = frame.f_back
    seen = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, UserWarning, frame.f_code.co_filename, frame.f_lineno, registry=seen)
