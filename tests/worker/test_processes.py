"""Processes such as vLLM starts, without vLLM: what they leave, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from nnsight_async.worker import last_words, processes
from nnsight_async.worker.processes import EngineContext, EngineProcess, kill, said_first

PATIENCE = 60.0  # seconds
FOR_EVER = (3600,)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(last_words.HOME, str(tmp_path))
    return tmp_path


@pytest.fixture
def start(home: Path) -> Any:
    started: list[EngineProcess] = []

    def starting(target: Callable[..., Any], *args: Any) -> EngineProcess:
        process = EngineContext().Process(target=target, args=args, name="Trial")
        process.start()
        started.append(process)
        return process

    yield starting
    for process in started:
        process.kill()
        process.join()


def ended(process: EngineProcess) -> int | None:
    process.join(PATIENCE)
    return process.exitcode


def heard(home: Path) -> str:
    """What was left, waited for: the one who writes it is told of the end when everybody is."""
    deadline = time.monotonic() + PATIENCE
    while (words := last_words.read(home)) is None:
        assert time.monotonic() < deadline, "nothing was left"
        time.sleep(0.01)
    return words


def test_what_a_process_raises_is_left_with_its_class_and_its_cause(start: Any, home: Path) -> None:
    process = start(exec, "raise RuntimeError('no luck') from KeyError('x')")

    assert ended(process) == 1
    assert last_words.read(home) == "RuntimeError: no luck (from KeyError: 'x')"


def test_the_first_words_stay(start: Any, home: Path) -> None:
    (home / "last_words").write_text("the cause")

    ended(start(exec, "raise RuntimeError('what came of it')"))

    assert last_words.read(home) == "the cause"


def test_what_a_process_was_killed_by_is_left(start: Any, home: Path) -> None:
    assert ended(start(len, ())) == 0
    assert last_words.read(home) is None

    start(exec, "import os; os.kill(os.getpid(), 9)")
    assert heard(home) == "the process Trial was ended by SIGKILL"


def test_who_tells_of_an_error_has_left_its_cause_first(
    start: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str | None] = []
    killer = processes._killer
    monkeypatch.setattr(processes, "_killer", lambda process: time.sleep(0.5) or killer(process))  # it comes late

    process = start(exec, "import os; os.kill(os.getpid(), 9)")
    connection.wait([process.sentinel], PATIENCE)
    try:
        raise RuntimeError("what came of it")
    except RuntimeError:
        said_first(lambda: told.append(last_words.read(home)))()

    assert told == ["the process Trial was ended by SIGKILL"]


def test_who_tells_of_an_error_has_left_it_first(home: Path) -> None:
    told: list[str | None] = []
    try:
        raise RuntimeError("no luck")
    except RuntimeError:
        said_first(lambda: told.append(last_words.read(home)))()

    assert told == ["RuntimeError: no luck"]


def test_the_exit_of_a_process_is_its_status(start: Any, home: Path) -> None:
    assert ended(start(sys.exit, 3)) == 3
    assert ended(start(sys.exit)) == 0
    assert last_words.read(home) is None


def test_exit_handlers_run_and_nothing_else_is_waited_for(start: Any, tmp_path: Path) -> None:
    code = f"""if True:
        import atexit, threading, time
        atexit.register(open({str(tmp_path / "handled")!r}, "w").close)
        threading.Thread(target=time.sleep, args=(3600,)).start()
    """
    assert ended(start(exec, code)) == 0
    assert (tmp_path / "handled").exists()


def test_an_interrupt_is_not_for_the_engine(start: Any) -> None:
    process = start(time.sleep, *FOR_EVER)
    os.kill(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGTERM)

    assert ended(process) == -signal.SIGTERM


def test_a_start_that_was_given_up_starts_nothing_more(start: Any, home: Path) -> None:
    process = start(time.sleep, *FOR_EVER)

    kill(home)

    assert ended(process) == -signal.SIGKILL
    with pytest.raises(RuntimeError, match="given up"):
        start(time.sleep, *FOR_EVER)


PARENT = """
import os, sys, time
from nnsight_async.worker.processes import EngineContext
if __name__ == "__main__":
    process = EngineContext().Process(target=exec, args=("import time; print('here', flush=True); time.sleep(3600)",))
    process.start()
    print(process.pid, flush=True)
    time.sleep(3600)
"""


def test_a_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    assert parent.stdout.readline() == "here\n"

    parent.kill()

    parent.wait()
    _, left = psutil.wait_procs([child], timeout=PATIENCE)
    assert not left
    parent.stdout.close()
