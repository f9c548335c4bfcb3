"""The examples that serve many at once, with a real HTTP client where they serve, against transformers in float32."""

from __future__ import annotations

import asyncio
import importlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn

from nnsight_async.testing import hf_model
from nnsight_async.testing.engine import drained
from nnsight_async.testing.oracle import generation

EXAMPLES = Path(__file__).parents[1] / "examples"
CLOSE = {"rtol": 1e-3, "atol": 1e-3}


@pytest.fixture(autouse=True)
def path_of_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture(scope="module")
def hf() -> Any:
    return hf_model("llama")


@pytest.fixture
def serve() -> Iterator[Callable[[Any], str]]:
    """Serves an application from a thread with a loop of its own, and gives its address."""
    servers: list[tuple[uvicorn.Server, threading.Thread, socket.socket]] = []

    def begin(app: Any) -> str:
        listening = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=asyncio.run, args=(server.serve(sockets=[listening]),))
        thread.start()
        servers.append((server, thread, listening))
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    yield begin
    for server, thread, listening in servers:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
        listening.close()


async def events(client: httpx.AsyncClient, **message: Any) -> list[dict[str, Any]]:
    async with client.stream("POST", "/chat", json=message) as answer:
        assert answer.status_code == 200
        return [json.loads(line.removeprefix("data: ")) async for line in answer.aiter_lines() if line]


async def test_a_chat_endpoint_with_a_score_for_each_token(model: Any, hf: Any, serve: Any) -> None:
    server, probes = importlib.import_module("chat_server"), importlib.import_module("stopping_probe")
    probe = await probes.fitted(model, 2)
    chat = [{"role": "user", "content": "Tell me of rain."}]
    ids = model.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    oracle = generation(hf, ids, 12)
    stream = oracle.streams[2][len(ids) - 1 :]
    expected = (stream @ probe.weight + probe.bias).tolist()
    async with httpx.AsyncClient(base_url=serve(server.application(model, probe)), timeout=60) as client:
        found = await events(client, message="Tell me of rain.", max_tokens=12)
        torch.testing.assert_close(torch.tensor([event["score"] for event in found]), torch.tensor(expected), **CLOSE)
        (plain,) = await model.generate([chat], max_tokens=12, temperature=0.0)
        assert "".join(event["text"] for event in found) == plain.outputs[0].text
        assert found[-1]["finish_reason"] == "length"

        ordered = sorted(expected)
        limit = (ordered[-1] + ordered[-2]) / 2
        stopped = await events(client, message="Tell me of rain.", max_tokens=12, limit=limit)
        assert len(stopped) == expected.index(ordered[-1]) + 1
        assert stopped[-1]["finish_reason"] == "stop"

        refused = await client.post("/chat", json={"message": "Hello", "temperature": -1})
        assert refused.status_code == 422
        assert "temperature" in refused.text

        together = await asyncio.gather(*(events(client, message="Tell me of rain.", max_tokens=12) for _ in range(8)))
        assert all(one == found for one in together)
    await drained(model)


async def test_a_client_that_goes_away_aborts_its_request(model: Any, serve: Any) -> None:
    server, probes = importlib.import_module("chat_server"), importlib.import_module("stopping_probe")
    address = serve(server.application(model, await probes.fitted(model, 2)))
    async with httpx.AsyncClient(base_url=address, timeout=60) as client:
        for _ in range(5):
            message = {"message": "Tell me of rain.", "max_tokens": 200}
            async with client.stream("POST", "/chat", json=message) as answer:
                async for _ in answer.aiter_lines():
                    break
        await drained(model)
        assert len(await events(client, message="Tell me of rain.", max_tokens=3)) == 3


async def test_a_monitor_of_many_chats(model: Any, hf: Any, capsys: pytest.CaptureFixture[str]) -> None:
    chats = await importlib.import_module("monitor").main(model, chats=100, max_tokens=6, every=0.05)
    assert len(chats) == 100
    for chat in chats[::20]:
        messages = [{"role": "user", "content": f"Say something about the number {chat.number}."}]
        ids = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        logits = generation(hf, ids, 6).logits
        expected = torch.distributions.Categorical(logits=logits).entropy()
        torch.testing.assert_close(torch.tensor(chat.entropies), expected, **CLOSE)
    assert "going" in capsys.readouterr().out
    await drained(model)


async def test_a_sweep_with_a_deadline(model: Any, hf: Any) -> None:
    sweep = importlib.import_module("sweep_with_deadline")
    measured = await sweep.main(model)
    assert len(measured) == len(sweep.PROMPTS) * len(hf.model.layers)
    prompt = sweep.PROMPTS[1]
    ids = model.tokenizer(prompt).input_ids
    plain = generation(hf, ids, 1).logits[0]
    handle = hf.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: torch.zeros_like(output))
    edited = generation(hf, ids, 1).logits[0]
    handle.remove()
    answer = int(plain.argmax())
    torch.testing.assert_close(measured[prompt, 1], float(plain[answer] - edited[answer]), **CLOSE)

    assert len(await sweep.main(model, seconds=0.01)) < len(measured)
    await drained(model)
