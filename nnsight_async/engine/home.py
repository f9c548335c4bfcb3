"""The folder of an engine: its socket, and the last words of its processes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from uuid import uuid4

import zmq

from nnsight_async.errors import EngineStartError
from nnsight_async.runs.frames import inbox_address

LONGEST = len(str(uuid4()))
"""Of the file names of sockets: those of vLLM's own, in the same folder for temporary files (0.32, 0.33)."""


def make_home() -> Path:
    """A new folder; `EngineStartError` where there can be none, or none with a path that a socket may have."""
    try:
        parent = tempfile.gettempdir()
        _check_length(parent)
        home = tempfile.mkdtemp(prefix="nnsight_async-")
    except OSError as error:
        raise EngineStartError(
            f"the engine needs a folder for its sockets, and none can be made: {error}\n"
            "make room there, or have the environment variable TMPDIR name a folder that can be written to"
        ) from error
    return Path(home)


def _check_length(parent: str) -> None:
    ours = inbox_address(f"{parent}/nnsight_async-12345678", 99).removeprefix("ipc://")
    theirs = f"{os.environ.get('VLLM_RPC_BASE_PATH', parent)}/{uuid4()}"
    longest = max(ours, theirs, key=lambda path: len(os.fsencode(path)))
    limit = zmq.IPC_PATH_MAX_LEN
    if len(os.fsencode(longest)) > limit:
        raise EngineStartError(
            f"the engine's sockets would lie in {str(Path(longest).parent)!r}, and the path of a socket may "
            f"have {limit} bytes at most: have the environment variable TMPDIR name a folder with a shorter path"
        )
