"""Engines that do not start, and engines that die."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest

from nnsight_async import VLLM, EngineDeadError, EngineStartError, NNsightError
from nnsight_async.testing.engine import tiny_engine_args

PROMPT = [5, 17, 101]


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_a_model_that_does_not_exist(tmp_path):
    with pytest.raises((OSError, ValueError)):
        VLLM(str(tmp_path / "nothing"), dispatch=True)


def test_vllms_reason_for_not_starting(llama):
    with pytest.raises((ValueError, EngineStartError), match="max_model_len"):
        VLLM(llama, dispatch=True, **{**tiny_engine_args(), "max_model_len": 1 << 20})


def test_what_blocks_rule_out_is_refused_by_name(llama):
    before = children()
    guesses = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    with pytest.raises(NNsightError, match="speculative decoding cannot be combined with blocks"):
        VLLM(llama, dispatch=True, speculative_config=guesses, **tiny_engine_args())
    _, left = psutil.wait_procs([psutil.Process(pid) for pid in children() - before], timeout=20)
    assert not left


async def test_an_engine_that_dies(llama):
    model = VLLM(llama, mode="async", **tiny_engine_args())
    async with asyncio.timeout(300), model:
        async with model.trace(PROMPT, max_tokens=250, ignore_eos=True) as tracer:
            for _ in tracer.iter[:]:
                logits = model.logits.save()
        await anext(logits.stream())
        core = model.vllm_entrypoint.engine_core.resources.engine_manager.processes[0].pid
        workers = psutil.Process(core).children(recursive=True)
        os.kill(core, signal.SIGKILL)
        for waited in (logits, tracer.result):
            with pytest.raises(EngineDeadError):
                await waited
        with pytest.raises(EngineDeadError):
            await model.generate(PROMPT)
    _, left = psutil.wait_procs(workers, timeout=20)
    assert not left
