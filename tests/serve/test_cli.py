"""The command, as a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from nnsight_async import VLLM, CaptureError, EngineDeadError, ServerError
from tests.conftest import LONG

KEY = "the-key-in-the-environment"
PROMPT = [5, 17, 101, 9, 33, 250, 77]

pytestmark = pytest.mark.slow


def begun(llama: str, errors: Any = None) -> tuple[subprocess.Popen[str], str]:
    """The command, serving."""
    command = [
        sys.executable, "-m", "nnsight_async.serve.cli", llama, "--port", "0", "--dtype", "float32",
        "--max-model-len", "4096", "--hf-overrides", '{"max_position_embeddings": 4096}', "--kv-cache-memory-bytes",
        str(64 << 20), "--distributed-executor-backend", "uni", "--served-model-name", "tiny", "--max-runs", "4",
    ]  # fmt: skip
    environment = {**os.environ, "NNSIGHT_API_KEY": KEY, "NNSIGHT_SERVE": "http://127.0.0.1:9"}
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True)
    assert started.stdout is not None
    said = next((line for line in started.stdout if line.startswith("nnsight-serve: ")), "")
    url = said.strip().rpartition(" at ")[2]
    assert url.startswith("http://127.0.0.1:")
    return started, url


@pytest.fixture(scope="module")
def process(llama: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    started, url = begun(llama)
    yield started, url
    started.send_signal(signal.SIGTERM)
    assert started.wait(60) == 0


async def test_it_serves_traces_and_the_openai_api(process: Any, llama: str) -> None:
    _, url = process
    with pytest.raises(ServerError, match="asks for a key"):
        VLLM(llama, serve=url, dispatch=True)
    async with VLLM(llama, mode="async", serve=url, api_key=KEY) as model:
        async with model.trace(PROMPT, max_tokens=2) as tracer:
            h = model.model.layers[2].resid_post[-1].save()
        assert (await h).shape == (128,)
        async with model.trace(PROMPT, max_tokens=2) as tracer:
            print("no --allow-python")
        with pytest.raises(CaptureError, match="cannot travel as data"):
            await tracer.result
    async with httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=60) as http:
        assert (await http.get("/v1/models")).json()["data"][0]["id"] == "tiny"


async def test_who_is_on_it_when_it_ends_hears_of_it(process: Any, llama: str) -> None:
    started, url = process
    async with VLLM(llama, mode="async", serve=url, api_key=KEY) as model:
        async with model.trace(PROMPT, **LONG) as tracer:
            for _ in tracer.iter[:]:
                h = model.model.layers[2].resid_post[-1].save()
        stream = tracer.stream()  # one that nobody holds is left, which cancels the run
        await anext(stream)
        started.send_signal(signal.SIGTERM)
        with pytest.raises((ServerError, RuntimeError)):
            async with asyncio.timeout(60):
                await tracer.result
        await stream.aclose()


async def test_it_ends_with_status_1_when_its_engine_dies(llama: str, tmp_path: Path) -> None:
    """So that whoever looks after it starts it again."""
    with (tmp_path / "errors").open("w") as errors:
        started, url = begun(llama, errors)
    try:
        async with VLLM(llama, mode="async", serve=url, api_key=KEY) as model:
            async with model.trace(PROMPT, max_tokens=240, ignore_eos=True) as tracer:
                for _ in tracer.iter[:]:
                    h = model.model.layers[2].resid_post[-1].save()
            stream = tracer.stream()
            await anext(stream)
            engine_of(started.pid).kill()
            with pytest.raises((EngineDeadError, ServerError)):
                async with asyncio.timeout(60):
                    await tracer.result
            await stream.aclose()
        assert await asyncio.to_thread(started.wait, 60) == 1
        assert "nnsight-serve: the engine has ended" in (tmp_path / "errors").read_text()
    finally:
        started.kill()
        started.wait()
        assert started.stdout is not None
        started.stdout.close()


def engine_of(server: int) -> psutil.Process:
    """The process in which vLLM's engine computes."""
    (found,) = [child for child in psutil.Process(server).children() if "EngineCore" in " ".join(child.cmdline())]
    return found
