"""What blocks printed and warned of, once more in the caller's process."""

from __future__ import annotations

import builtins
import contextlib
import sys
import warnings

_printing: set[int] = set()
"""Keys of the runs that have printed and still go."""

_begun: list[int] = []
"""The run whose line is not at its end yet, if there is one."""

Warned = tuple[str, str, str, int]


def echo(key: int, text: str) -> None:
    """Print what a block has printed; each line is of one run, and says of which when several print at once."""
    if not text:
        return
    _printing.add(key)
    goes_on, ended = _begun == [key], text.endswith("\n")
    if len(_printing) > 1:
        lines = [f"[run {key}] {line}" for line in text.splitlines(keepends=True)]
        text = "".join(lines).removeprefix(f"[run {key}] " if goes_on else "")
    if _begun and not goes_on:
        text = f"\n{text}"
    _begun[:] = [] if ended else [key]
    with contextlib.suppress(OSError, ValueError):  # a closed or broken stdout is no reason to lose values
        sys.stdout.write(text)
        sys.stdout.flush()


def forget(key: int) -> None:
    """The run is over."""
    _printing.discard(key)
    if not _printing:
        _begun.clear()  # as with prints of the caller's own, the next one goes on in the line


def warn(warned: Warned) -> None:
    """Issue a warning of a block again, at its own place, under the filters of this process."""
    category, message, filename, line = warned
    warnings.warn_explicit(message, _category(category), filename, line)


def _category(qualified: str) -> type[Warning]:
    module, _, name = qualified.rpartition(".")
    found = vars(sys.modules.get(module, builtins)).get(name, UserWarning)  # nothing is imported for it
    return found if isinstance(found, type) and issubclass(found, Warning) else UserWarning
