"""Engines that start with nothing asked of them, and engines that do not start."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from nnsight_async import VLLM, EngineStartError, NNsightError
from nnsight_async.testing.engine import tiny_engine_args

PROMPT = [5, 17, 101]
PATIENCE = 60  # seconds


@pytest.fixture(autouse=True)
def nothing_stays() -> Any:
    """No process of an engine that has not started, or was closed, is left."""
    before = children()
    yield
    _, left = psutil.wait_procs([psutil.Process(pid) for pid in children() - before], timeout=PATIENCE)
    assert not left


def children() -> set[int]:
    """All but multiprocessing's own, which stays to the end of this process."""
    found = psutil.Process().children(recursive=True)
    return {child.pid for child in found if "resource_tracker" not in command(child)}


def command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def copied(checkpoint: str, folder: Path) -> Path:
    return Path(shutil.copytree(checkpoint, folder / "checkpoint"))


def not_started(checkpoint: str, **arguments: Any) -> str:
    with pytest.raises(EngineStartError) as caught:
        VLLM(checkpoint, dispatch=True, **{**tiny_engine_args(), **arguments})
    return str(caught.value)


def test_with_nothing_asked_of_it(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As a newcomer has it: bfloat16, a worker in a process of its own.
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    with VLLM(llama, dispatch=True) as model:
        with model.trace(PROMPT, max_tokens=3, ignore_eos=True):
            logits = model.logits.save()
        cache = model.vllm_entrypoint.vllm_config.cache_config
        longest = model.vllm_entrypoint.vllm_config.model_config.max_model_len

    assert torch.isfinite(logits).all()
    assert logits.shape == (1, 512)
    blocks = -(-longest // cache.block_size)
    assert 16 * blocks <= cache.num_gpu_blocks <= 16 * (blocks + 1)  # one of each request's is vLLM's


def test_what_the_engine_core_finds_too_small(llama: str) -> None:
    words = not_started(llama, kv_cache_memory_bytes=3 << 17)  # 192 tokens

    assert "ValueError: To serve at least one request" in words
    assert "set a smaller max_model_len, or a larger kv_cache_memory_bytes" in words


@pytest.mark.parametrize("executor", ["uni", pytest.param("mp", marks=pytest.mark.slow)])
def test_weights_that_are_damaged(llama: str, tmp_path: Path, executor: str) -> None:
    folder = copied(llama, tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])

    words = not_started(str(folder), distributed_executor_backend=executor)

    assert "SafetensorError" in words
    assert "the weights of the checkpoint are damaged" in words


def test_a_process_that_is_killed_while_it_starts(llama: str) -> None:
    before = children()

    def kill_the_first() -> None:
        while True:
            for child in psutil.Process().children():
                if child.pid not in before and "spawn_main" in command(child):
                    child.kill()
                    return

    threading.Thread(target=kill_the_first, daemon=True).start()
    words = not_started(llama)

    assert "the process EngineCore was ended by SIGKILL" in words
    assert "the machine has run out of memory" in words


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["uni", "mp"])
def test_more_memory_than_there_is(llama: str, executor: str) -> None:
    words = not_started(llama, kv_cache_memory_bytes=1 << 50, distributed_executor_backend=executor)

    assert "ValueError: Available memory on node" in words
    assert "set a smaller kv_cache_memory_bytes" in words


@pytest.mark.slow
def test_a_name_that_no_module_has(llama: str) -> None:
    with pytest.raises(ValueError, match="the model has no module 'nowhere'"):
        VLLM(llama, dispatch=True, rename={"nowhere": "here"}, **tiny_engine_args())


def test_what_blocks_rule_out_is_refused_by_name(llama: str) -> None:
    guesses = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    with pytest.raises(NNsightError, match="speculative decoding cannot be combined with blocks"):
        VLLM(llama, dispatch=True, speculative_config=guesses, **tiny_engine_args())


def test_vllms_reason_for_refusing_an_argument(llama: str) -> None:
    with pytest.raises(ValueError, match="max_model_len") as caught:
        VLLM(llama, dispatch=True, **{**tiny_engine_args(), "max_model_len": 1 << 20})

    assert "validation error" not in str(caught.value)


def test_an_architecture_that_vllm_does_not_have(llama: str, tmp_path: Path) -> None:
    folder = copied(llama, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchForCausalLM"]}))

    with pytest.raises(ValueError, match="NoSuchForCausalLM") as caught:
        VLLM(str(folder), dispatch=True, **tiny_engine_args())

    assert "pydantic" not in str(caught.value)
