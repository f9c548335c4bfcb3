"""What is logged, and what comes beside the text."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from nnsight_async import VLLM
from nnsight_async.testing.engine import drained

PROMPT = [5, 17, 101]


def fail_in_step_1(model: Any, tracer: Any) -> None:
    for step in tracer.iter[:]:
        if step == 1:
            raise KeyError("secret")


def say_nothing(model: Any, tracer: Any) -> None:
    pass


@pytest.fixture
def runs(caplog: pytest.LogCaptureFixture) -> Any:
    """The records of runs, as dicts."""
    caplog.set_level(logging.DEBUG, logger="nnsight_async")
    return lambda: [vars(record) for record in caplog.records if hasattr(record, "run")]


async def test_a_run_that_has_ended(model: VLLM, runs: Any) -> None:
    await model.run(PROMPT, say_nothing, max_tokens=3, ignore_eos=True)
    await drained(model)

    (told,) = runs()
    expected = {"model": model.repo, "invoke": 0, "sequence": 0, "outcome": "finished", "error": None, "line": None}
    assert {name: told[name] for name in expected} == expected
    assert told["step"] == 2
    assert told["levelno"] == logging.DEBUG
    assert told["name"].startswith("nnsight_async.")


async def test_a_run_whose_block_has_failed(model: VLLM, runs: Any) -> None:
    with pytest.raises(KeyError):
        await model.run(PROMPT, fail_in_step_1, max_tokens=3, ignore_eos=True)
    await drained(model)

    (told,) = runs()
    assert (told["outcome"], told["error"], told["step"]) == ("failed", "KeyError", 1)
    assert told["line"] == f"{__file__}:{fail_in_step_1.__code__.co_firstlineno + 3}"
    assert "secret" not in str(told)
    assert "101" not in str({name: told[name] for name in ("msg", "args", "line", "error")})


async def test_nothing_is_said_where_nobody_listens(model: VLLM, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="nnsight_async"):
        await model.run(PROMPT, say_nothing, max_tokens=3)
        await drained(model)
    assert not caplog.records
