"""Where files that outlive the process go: one cache folder, and folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def cache_folder(*parts: str) -> Path:
    """The cache folder (`NNSIGHT_ASYNC_CACHE`, else `nnsight_async` in the XDG cache folder), with `parts` below it."""
    if chosen := os.environ.get("NNSIGHT_ASYNC_CACHE"):
        root = Path(chosen)
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nnsight_async"
    return root.joinpath(*parts)


def publish(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Make `folder` by calling `fill` on an empty one beside it and renaming; an existing `folder` is kept as it is.

    Of several processes that do this at once one wins, and the others use its folder.
    """
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        fill(draft)
        draft.chmod(0o755)
        with contextlib.suppress(OSError):  # somebody else was first: a folder with files is never replaced
            draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    if not folder.exists():
        raise OSError(f"{folder} could not be made")
    return folder
