"""The error of a run that nobody asks for is logged, once."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nnsight_async import EngineClosedError, RunCancelledError, Saved
from nnsight_async.capture.block import Block
from nnsight_async.runs.group import Invokes, planned
from nnsight_async.runs.request import Request
from nnsight_async.runs.run import Run
from nnsight_async.runs.saved import Saves
from nnsight_async.runs.stream import Stream
from nnsight_async.runs.window import Window

ROOT = Path(__file__).parents[2]
BLOCK = Block(b"", ("x",), "file.py", 1, "function")


def failed(error: Exception | None = None) -> Run:
    run = Run(Request({"prompt_token_ids": [1, 2]}, None), BLOCK)
    run.fail(error or ValueError("mine"))
    return run


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, int, str]]:
    return [(record.name, record.levelno, str(record.exc_info and record.exc_info[1])) for record in caplog.records]


ONCE = [("nnsight_async.runs.unheard", logging.ERROR, "mine")]


def test_when_the_last_who_could_ask_is_gone(caplog):
    run = failed()
    saved, saves, stream = Saved(run, "x"), Saves(run), Stream(run)
    assert saved.done()
    del run, saves, stream
    assert logged(caplog) == []
    del saved
    assert logged(caplog) == ONCE
    assert "nothing asked for its saves, its result or its tokens" in caplog.text


def test_not_while_it_still_goes(caplog):
    Run(Request({"prompt_token_ids": [1, 2]}, None), BLOCK)
    assert logged(caplog) == []


ASKING = {
    "value": lambda run: Saved(run, "x").result(),
    "values": lambda run: Saves(run).result(),
    "result": lambda run: run.outcome(),
    "tokens": lambda run: list(Stream(run)),
}


@pytest.mark.parametrize("ask", ASKING.values(), ids=ASKING)
def test_not_when_it_was_asked_for(ask, caplog):
    run = failed()
    with pytest.raises(ValueError, match="mine"):
        ask(run)
    del run
    assert logged(caplog) == []


@pytest.mark.parametrize("error", [RunCancelledError("cancelled"), EngineClosedError("closed")], ids=repr)
def test_not_when_the_caller_ended_it(error, caplog):
    failed(error)
    assert logged(caplog) == []


def sequences(count: int) -> Any:
    return planned(Request({"prompt_token_ids": [1, 2]}, SimpleNamespace(n=count, seed=None)), BLOCK)


def test_the_sequences_of_a_prompt_have_one_error(caplog):
    group = sequences(3)
    for run in group.runs():
        run.fail(ValueError("mine"))
    del run, group
    assert logged(caplog) == ONCE


def test_the_sequences_of_a_prompt_are_heard_together(caplog):
    group = sequences(3)
    for run in group.runs():
        run.fail(ValueError("mine"))
    with pytest.raises(ValueError, match="mine"):
        Saved(group, "x").result()
    del run, group
    assert logged(caplog) == []


def test_invokes_have_one_each(caplog):
    group = Invokes([failed(KeyError("first")), failed()])
    with pytest.raises(KeyError, match="first"):
        group.outcome()
    assert logged(caplog) == []
    del group
    gc.collect()  # the error that was raised, its frames and the group know one another
    assert logged(caplog) == ONCE


def test_a_map_tells_of_the_errors_itself(caplog):
    window = Window(2, ordered=True)
    for _ in range(2):
        run = Run(Request({"prompt_token_ids": [1, 2]}, None), BLOCK)
        window.add("prompt", run)
        run.fail(ValueError("mine"))
    del run
    assert str(window.take().error) == "mine"
    window.cancel()
    del window
    assert logged(caplog) == []


def test_at_the_end_of_the_program():
    program = (
        "from nnsight_async.runs.request import Request\nfrom nnsight_async.runs.run import Run\n"
        "run = Run(Request({}, None))\nrun.fail(ValueError('mine'))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stderr.endswith("ValueError: mine\n")
    assert result.stderr.count("mine") == 1
