"""Starting vLLM's processes, and saying why they did not start."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnsight_async.errors import EngineDeadError, EngineStartError
from nnsight_async.worker import last_words, processes

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

ADVICE = {
    r"KV cache is needed|No available memory for the cache": "set a smaller max_model_len, or a larger "
    "kv_cache_memory_bytes",
    r"Available memory on node": "set a smaller kv_cache_memory_bytes or max_model_len, or end what else takes memory",
    r"Free memory on device": "set a smaller gpu_memory_utilization, or end what else is on the GPU",
    r"OutOfMemoryError|out of memory": "set a smaller max_model_len, max_num_seqs or kv_cache_memory_bytes, or take a "
    "smaller dtype or model",
    r"No space left on device|Disk quota exceeded|Read-only file system|ZMQError": "make room in the folder for "
    "temporary files, where the engine's sockets are, or have the environment variable TMPDIR name another",
    r"SafetensorError": "the weights of the checkpoint are damaged or incomplete: fetch them again",
    r"ended by SIGKILL": "most likely the machine has run out of memory: set a smaller max_model_len or "
    "kv_cache_memory_bytes",
    r"ended by SIGILL": "this build of vLLM or torch uses instructions that the processor does not have",
}
"""What to do, by what the message of a failure looks like (vLLM 0.32, 0.33)."""

_environment = threading.Lock()


def start_vllm(settings: dict[str, Any], home: Path) -> AsyncLLM:
    """vLLM's engine, its processes started; what goes wrong in them is left in `home`."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine import utils
    from vllm.v1.engine.async_llm import AsyncLLM

    with _environment, _variables(home), processes.entered(utils):
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))


def start_error(error: Exception, home: Path) -> Exception:
    """What to raise for an engine that did not start.

    An error of one of its processes is an `EngineStartError` with the words that it has left; an error of the arguments
    is what vLLM makes of it.
    """
    words = left_in(home)
    if words is None and isinstance(error, ValueError):
        return error if type(error) is ValueError else ValueError(last_words.essence(error))
    if words is None and isinstance(error, (TypeError, OSError, NotImplementedError)) and not _is_of_disk(error):
        return error
    return EngineStartError(f"the engine did not start: {words or _advised(last_words.words_of(error))}")


def _is_of_disk(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def dead_error(home: Path) -> EngineDeadError:
    """What to raise for an engine whose processes have ended."""
    words = left_in(home)
    cause = "; " if words is None else f": {words}\n"
    return EngineDeadError(f"the engine's processes have ended{cause}close this model and build a new one")


def left_in(home: Path) -> str | None:
    """What the first process to fail has said, and what to do about it where that is known."""
    processes.hear()
    words = last_words.read(home)
    return None if words is None else _advised(words)


def _advised(words: str) -> str:
    return "\n".join([words, *[what for pattern, what in ADVICE.items() if re.search(pattern, words)][:1]])


@contextmanager
def _variables(home: Path) -> Generator[None]:
    """The environment in which vLLM starts its processes."""
    ours = {last_words.HOME: str(home), "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
