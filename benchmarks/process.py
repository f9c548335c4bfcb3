"""Engines in processes of their own, spoken to in JSON lines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.columns import EngineKind
from nnsight_async.testing.environment import quiet_environment

ROOT = Path(__file__).parent.parent
PATIENCE = 60
"""Seconds that an engine may take to end by itself."""


class SubjectError(RuntimeError):
    """An engine's process failed; the message holds what it said last."""


class Subject:
    """A process with one engine. Leaving the `with` ends it and all that it started."""

    def __init__(self, kind: EngineKind, arguments: dict[str, Any]) -> None:
        self.kind = kind
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- closed by `end`
        search_path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **quiet_environment(),
            **os.environ,
            "PYTHONPATH": os.pathsep.join(search_path),
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.subject"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
            env=environment,
            start_new_session=True,  # so that the whole family can be ended
        )
        try:
            self.versions = self.ask({"kind": kind, "arguments": arguments})
        except BaseException:
            self.end()
            raise

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Send one command and wait for its reply; `SubjectError` if the process cannot give one."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: the reply below is empty
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        reply: dict[str, Any] = json.loads(line) if line else {"error": "it ended without a reply"}
        if "error" in reply:
            raise SubjectError(f"the {self.kind} engine failed: {reply['error']}\n{self._last_words()}")
        return reply

    def end(self) -> None:
        """Let it close its engine, then end whatever is left."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._log.close()

    def _last_words(self) -> str:
        self._log.seek(0)
        return "".join(self._log.readlines()[-20:])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()
