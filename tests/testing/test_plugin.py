"""A suite of somebody else's: event loops of every scope, anyio, and no loop, all on one engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONFTEST = """
import os

os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS="1")
pytest_plugins = ["nnsight_async.testing.plugin"]
"""

SUITE = """
import asyncio

import pytest

GREEDY = {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True}
found = []


async def ids(model):
    async with model.trace([5, 17, 101], **GREEDY) as tracer:
        for step in tracer.iter[:]:
            token = model.samples[0, 0].save()
    return [int(token.saves["token"]) async for token in tracer.stream()]


def check(model, seen):
    found.append(seen)
    assert len(seen) == 3 and seen == found[0]


@pytest.mark.asyncio
@pytest.mark.parametrize("number", range(3))
async def test_a_loop_for_each_function(tiny_model, number):
    check(tiny_model, await ids(tiny_model))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("number", range(2))
async def test_a_loop_for_the_module(tiny_model, number):
    check(tiny_model, await ids(tiny_model))


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("number", range(2))
async def test_a_loop_for_the_session(tiny_model, number):
    check(tiny_model, await ids(tiny_model))


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", ("asyncio", {"use_uvloop": True})])
async def test_the_plugin_of_anyio(tiny_model, anyio_backend):
    check(tiny_model, await ids(tiny_model))


def test_no_loop(tiny_model):
    with tiny_model.trace([5, 17, 101], **GREEDY) as tracer:
        logits = tiny_model.logits.save()
    assert logits.shape == (1, 512)
    check(tiny_model, list(tracer.result.outputs[0].token_ids))


def test_a_loop_of_its_own(tiny_model):
    for _ in range(2):
        check(tiny_model, asyncio.run(ids(tiny_model)))
"""


def test_a_suite_on_one_engine(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_suite.py").write_text(SUITE)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    assert "11 passed" in ended.stdout
