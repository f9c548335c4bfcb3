"""The client and the routes over HTTP, with a stand-in for the engine that draws tokens by counting."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
import uvicorn
import vllm  # noqa: F401 -- which takes long, and the loop that serves would do it at its first request
from fastapi import FastAPI

from nnsight_async import VLLM, RunCancelledError, ServerError, SlowConsumerError
from nnsight_async.runs.carried import rebuilt
from nnsight_async.runs.frames import Frame
from nnsight_async.serve import messages as m
from nnsight_async.serve import wire
from nnsight_async.serve.access import LOOPBACK, Gate, Keys
from nnsight_async.serve.app import Service, Streamed, router
from nnsight_async.serve.outputs import Completion, Output
from nnsight_async.serve.policy import Policy, ServerLimits
from tests.serve.test_program import MANIFEST

PATIENCE = 60.0  # seconds
FOR_EVER = 3600.0
TABLE = torch.arange(200_000.0)
LIMITS = ServerLimits(runs=3, beat=FOR_EVER, waiting=1 << 22, run_seconds=FOR_EVER, uploads=2_000_000)


class Counting:
    """Draws 0, 1, 2, ..., and saves a row of that number under `h` at each step."""

    repo = "toy"
    taps = ()

    def __init__(self) -> None:
        self.going: set[Any] = set()
        self.most = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self.width = 4
        self.pause = 0.0
        self.together = 0
        """So many runs have to have been there at a time before the first goes on."""

    async def alaunch(self, run: Any) -> None:
        run.ride(())
        self.going.add(run)
        self.most = max(self.most, len(self.going))
        run.ended.once(lambda: self.going.discard(run))
        task = asyncio.ensure_future(self._draw(run))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _draw(self, run: Any) -> None:
        count = run.request.params.max_tokens
        while self.most < self.together:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for step in range(count):
            if run.settled:
                return
            last = step == count - 1
            completion = Completion(0, f" {step}", [step], finish_reason="length" if last else None)
            run.feed_output(Output("r", None, [1], None, [completion], last))
            if run.has_blocks:
                entries = [("h", "set", torch.full((self.width,), float(step)))]
                run.feed_frame(Frame(run.key, step, entries, done=last, number=step))
            await asyncio.sleep(self.pause)


@pytest.fixture
def engine() -> Counting:
    return Counting()


@pytest.fixture
def limits() -> ServerLimits:
    return LIMITS


@pytest.fixture
def url(engine: Counting, limits: ServerLimits) -> Iterator[str]:
    no_edits = SimpleNamespace(edits=SimpleNamespace(installed=()))
    policy = Policy(MANIFEST, allow_python=False, loras={}, max_model_len=1000)
    app = FastAPI()
    service = Service(engine, no_edits, policy, limits)  # type: ignore[arg-type]
    app.include_router(router(service))
    listening = socket.create_server(("127.0.0.1", 0))
    gate = Gate(app, Keys([]), LOOPBACK, service.uploads)
    server = uvicorn.Server(uvicorn.Config(gate, log_level="error", lifespan="off"))
    thread = threading.Thread(target=asyncio.run, args=(server.serve(sockets=[listening]),))
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join(PATIENCE)
    assert not thread.is_alive()
    listening.close()


@pytest.fixture
async def model(url: str) -> Any:
    async with VLLM("toy", mode="async", serve=url) as model:
        yield model


async def until(holds: Any) -> None:
    async with asyncio.timeout(PATIENCE):
        while not holds():  # noqa: ASYNC110 -- what is waited for happens in another thread
            await asyncio.sleep(0.01)


async def plainly(model: Any, steps: int) -> None:
    await model.generate(["x"], max_tokens=steps)


async def with_a_table(model: Any, steps: int) -> None:
    async with model.trace("x", max_tokens=steps):
        h = (model.layers[0].output * TABLE[0]).save()
    await h


async def test_tokens_and_values_come_in_their_steps(model: Any, engine: Counting) -> None:
    async with model.trace("x", max_tokens=4) as tracer:
        h = model.layers[0].output.save()
    tokens = [token async for token in tracer.stream()]
    assert [token.id for token in tokens] == [0, 1, 2, 3]
    assert [token.saves["h"].tolist() for token in tokens] == [[float(step)] * 4 for step in range(4)]
    assert (await h).tolist() == [3.0] * 4
    assert (await tracer.result).outputs[0].text == " 0 1 2 3"
    await until(lambda: not engine.going)


async def test_a_client_waits_its_turn(model: Any, engine: Counting) -> None:
    engine.together = LIMITS.runs
    outputs = await model.generate(["x"] * 20, max_tokens=5)
    assert [output.outputs[0].token_ids for output in outputs] == [[0, 1, 2, 3, 4]] * 20
    assert engine.most == LIMITS.runs


async def test_what_another_client_leaves_no_room_for_is_refused(model: Any, engine: Counting, url: str) -> None:
    engine.pause = FOR_EVER
    tasks = [asyncio.ensure_future(model.generate(["x"], max_tokens=100)) for _ in range(LIMITS.runs)]
    await until(lambda: len(engine.going) == LIMITS.runs)
    async with VLLM("toy", mode="async", serve=url) as another:
        with pytest.raises(ServerError, match="3 runs going") as raised:
            await another.generate(["x"], max_tokens=1)
    assert raised.value.status == 429
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: not engine.going)


async def test_a_client_waits_until_there_is_room_for_what_it_sends(model: Any, engine: Counting, url: str) -> None:
    engine.together = 2
    await asyncio.gather(*(with_a_table(model, 20) for _ in range(6)))
    assert engine.most == 2  # of 800,000 bytes each
    engine.pause = FOR_EVER
    waiting = [asyncio.ensure_future(with_a_table(model, 20)) for _ in range(2)]
    await until(lambda: len(engine.going) == 2)
    async with VLLM("toy", mode="async", serve=url) as another:
        with pytest.raises(ServerError, match="2,000,000 bytes together") as raised:
            await with_a_table(another, 1)
    assert raised.value.status == 429
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await until(lambda: not engine.going)


async def test_who_leaves_aborts_though_nothing_is_being_sent(model: Any, engine: Counting) -> None:
    engine.pause = FOR_EVER
    async with model.trace("x", max_tokens=50) as tracer:
        h = model.layers[0].output.save()
    async with tracer.stream() as stream:
        await anext(stream)
    with pytest.raises(RunCancelledError):
        await h
    await until(lambda: not engine.going)


@pytest.mark.parametrize("steps", [1, 100_000])
async def test_no_connection_is_left(model: Any, engine: Counting, steps: int) -> None:
    """Nor a run: a message that comes as its run settles ends the reading, which is then cancelled while it closes."""
    await model.generate(["x"], max_tokens=1)
    remote = model._engine
    pool = remote.client._transport._pool
    for _ in range(30):
        async with model.trace("x", max_tokens=steps) as tracer:
            model.layers[0].output.save("h")
        async with tracer.stream() as stream:
            await anext(stream)
        await until(lambda: not engine.going and not remote.held)
        assert not pool._requests
        assert all(connection.is_idle() for connection in pool.connections)


async def test_an_answer_that_cannot_be_closed_is_nobodys_error(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed = []
    close = httpx.Response.aclose

    async def aclose(answer: httpx.Response) -> None:
        await close(answer)
        closed.append(answer)
        raise httpx.CloseError("the other side has gone")

    monkeypatch.setattr(httpx.Response, "aclose", aclose)
    async with model.trace("x", max_tokens=2) as tracer:
        model.layers[0].output.save("h")
    assert (await tracer.result).outputs[0].token_ids == [0, 1]
    await until(lambda: not model._engine.held and bool(closed))
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize(("sent", "most"), [(plainly, LIMITS.runs), (with_a_table, 2)])
async def test_who_leaves_has_room_for_the_next(
    model: Any, engine: Counting, monkeypatch: pytest.MonkeyPatch, sent: Any, most: int
) -> None:
    """Also where the server hears of the next, on one connection, before it does of the end, on another."""
    watch = Streamed._watch

    async def late(streamed: Streamed, receive: Any) -> None:
        async def receives() -> Any:
            message = await receive()
            if message["type"] == "http.disconnect":
                await asyncio.sleep(0.1)
            return message

        await watch(streamed, receives)

    monkeypatch.setattr(Streamed, "_watch", late)
    engine.pause = FOR_EVER
    first = [asyncio.ensure_future(sent(model, 2)) for _ in range(most)]
    await until(lambda: len(engine.going) == most)
    another = asyncio.ensure_future(sent(model, 1))
    for task in first:
        task.cancel()
    await another
    await asyncio.gather(*first, return_exceptions=True)
    await until(lambda: not engine.going)


async def test_an_edit_is_one_thing(url: str) -> None:
    ops = {"vectors": [], "changes": [], "captures": []}
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as http:
        for given, why in (({"block": None}, "a block or"), ({"block": None, "ops": ops}, "it would do nothing")):
            content = wire.encode({"type": "edit", "id": "a" * 32, **given})
            answer = await http.post("/nnsight/v1/edits", content=content, headers={"content-type": wire.CONTENT_TYPE})
            assert answer.status_code == 400
            assert why in answer.text


@pytest.mark.parametrize("limits", [replace(LIMITS, beat=0.05)])
async def test_a_quiet_stream_is_kept_alive(model: Any, engine: Counting, url: str) -> None:
    engine.pause = FOR_EVER
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as http:
        content = wire.encode({"type": "run", "id": "a" * 32, "prompt": "x", "sampling": {"max_tokens": 2}})
        headers = {"content-type": wire.CONTENT_TYPE}
        async with http.stream("POST", "/nnsight/v1/runs", content=content, headers=headers) as answer:
            said = wire.messages(answer.aiter_raw(), m.replies, m.REPLY_BOUNDS)
            async with asyncio.timeout(PATIENCE):
                assert [type((await anext(said)).body) for _ in range(4)] == [m.Begun, m.Delta, m.Alive, m.Alive]
    await until(lambda: not engine.going)
    engine.pause = 0.2
    (output,) = await model.generate(["x"], max_tokens=3)
    assert output.finished


@pytest.mark.parametrize("limits", [replace(LIMITS, run_seconds=0.5)])
async def test_a_long_run_is_ended(model: Any, engine: Counting) -> None:
    engine.pause = FOR_EVER
    with pytest.raises(TimeoutError, match=r"a run of more than 0\.5 s"):
        await model.generate(["x"], max_tokens=2)
    await until(lambda: not engine.going)


async def test_who_does_not_read_is_let_go_and_holds_no_more_than_the_limit(engine: Counting, url: str) -> None:
    engine.width = 1 << 18  # a mebibyte each
    block = {"type": "declared", "statements": [{"kind": "stop"}]}
    asked = {"type": "run", "id": "f" * 32, "prompt": "x", "sampling": {"max_tokens": 100}, "block": block}
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as http:
        headers = {"content-type": wire.CONTENT_TYPE}
        async with http.stream("POST", "/nnsight/v1/runs", content=wire.encode(asked), headers=headers) as answer:
            await until(lambda: not engine.going)  # though nothing has been read
            data = b"".join([chunk async for chunk in answer.aiter_raw()])
    assert len(data) < 3 * LIMITS.waiting

    async def whole() -> Any:
        yield data

    *_, failed, ended = [one.body async for one in wire.messages(whole(), m.replies, m.REPLY_BOUNDS)]
    assert isinstance(ended, m.Ended)
    assert isinstance(rebuilt(failed.error), SlowConsumerError)


async def test_what_the_server_finds_wrong_is_raised_as_here(model: Any) -> None:
    with pytest.raises(ValueError, match="temperature"):
        await model.generate(["x"], temperature=-1.0)
    with pytest.raises(TypeError, match="seed"):
        await model.generate(["x"], seed="one")
    with pytest.raises(ValueError, match="characters"):
        await model.generate(["x" * 1_000_000], max_tokens=1)
