"""What a server takes of whom it knows nothing of, and of whom it knows: without an engine."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
import uvicorn

from nnsight_async.runs.edit import of_operations
from nnsight_async.runs.ops import Op, Vector
from nnsight_async.serve import plain
from nnsight_async.serve.access import ANYONE, Gate, single
from nnsight_async.serve.edits import ServedEdits
from nnsight_async.serve.server import LONGEST_HEAD, patient
from nnsight_async.serve.uploads import Refused, Uploads

KEY = "a key of some length"
MOST = 100_000
UPLOADS = 250_000
PATIENCE = 60.0  # seconds
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Reads a body, where the path is not /health, and answers with how long it was."""
    length, more = 0, scope["path"] != "/health"
    while more:
        try:
            message = await receive()
        except Refused as error:
            await send({"type": "http.response.start", "status": error.status, "headers": []})
            await send({"type": "http.response.body", "body": str(error).encode()})
            return
        if message["type"] == "http.disconnect":
            await send({"type": "http.response.start", "status": 400, "headers": []})
            await send({"type": "http.response.body", "body": b"gone"})
            return
        length, more = length + len(message["body"]), message["more_body"]
    body = str(length).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def uploads() -> Uploads:
    return Uploads(UPLOADS)


@contextmanager
def serving(uploads: Uploads, patience: float) -> Iterator[int]:
    """A server that waits so many seconds for who owes it something; gives its port."""
    listening = socket.create_server(("127.0.0.1", 0))
    gate = Gate(app, single(KEY), None, uploads, MOST)
    server = uvicorn.Server(uvicorn.Config(gate, log_level="error", lifespan="off", http=patient(patience)))
    thread = threading.Thread(target=asyncio.run, args=(server.serve(sockets=[listening]),))
    thread.start()
    yield listening.getsockname()[1]
    server.should_exit = True
    thread.join(PATIENCE)
    assert not thread.is_alive()
    listening.close()


@pytest.fixture(scope="module")
def port(uploads: Uploads) -> Iterator[int]:
    with serving(uploads, PATIENCE) as port:
        yield port


@pytest.fixture(scope="module")
def hasty() -> Iterator[int]:
    with serving(Uploads(UPLOADS), 1.0) as port:
        yield port


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What comes until the connection is closed."""
    async with asyncio.timeout(PATIENCE):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


@pytest.mark.parametrize(
    "owed",
    [
        b"",
        GET,
        b"%s\r\n%s" % (GET, GET),
        b"%sContent-Length: 1000\r\n\r\nabc" % GET,
        b"POST /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nabc",
    ],
    ids=["nothing", "a head", "a second head", "a body that nobody reads", "a body that is refused"],
)
async def test_who_owes_the_rest_of_a_request_is_let_go(hasty: int, owed: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", hasty)
    writer.write(owed)
    answers = owed.count(b"\r\n\r\n")
    assert (await ended(reader)).count(b"HTTP/1.1 ") == answers
    writer.close()


@pytest.mark.parametrize(
    "begun",
    [GET, b"%s\r\n%s" % (GET, GET), b"%sTransfer-Encoding: chunked\r\n\r\n0\r\n" % GET],
    ids=["first", "second", "after the body"],
)
async def test_a_head_without_end_is_cut_off(port: int, begun: bytes) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(begun)
    sent = 0
    with suppress(ConnectionError):
        while sent < 1 << 28:
            writer.write(b"x: " + b"a" * 60_000 + b"\r\n")
            await writer.drain()
            sent += 60_000
    assert sent < 1 << 28
    assert sent >= LONGEST_HEAD
    writer.close()


async def test_bodies_of_other_routes_have_a_length(port: int) -> None:
    async def parts(count: int, of: bytes) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield of

    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=PATIENCE) as http:
        path = "/v1/completions"
        assert (await http.post(path, content=b"x" * MOST)).text == str(MOST)
        assert (
            await http.post(path, content=parts(20_000, b"xy"))
        ).text == "40000"  # whose framing is longer than a head
        assert (await http.post(path, content=b"x" * (MOST + 1))).status_code == 413
        assert (await http.post(path, content=parts(MOST // 1000 + 1, b"x" * 1000))).text == "gone"


async def sending(port: int, path: str, parts: Any, released: asyncio.Event) -> httpx.Response:
    """A request whose body is `parts`, and then, when it may, one byte more."""

    async def body() -> AsyncIterator[bytes]:
        for part in parts:
            yield part
        await released.wait()
        yield b"x"

    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as http:
        return await http.post(path, content=body(), headers={"authorization": f"Bearer {KEY}"})


async def test_a_key_has_so_many_bytes_on_their_way(port: int, uploads: Uploads) -> None:
    """Whether they are announced or come in pieces, and whatever the route; they are free again with the answer."""
    released = asyncio.Event()
    going = [asyncio.ensure_future(sending(port, "/v1/completions", [b"x" * 90_000], released)) for _ in range(2)]
    async with asyncio.timeout(PATIENCE):
        while uploads.held("key") < 180_000:  # noqa: ASYNC110 -- of another thread
            await asyncio.sleep(0.01)
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=PATIENCE) as http:
        for path in ("/v1/completions", "/nnsight/v1/runs"):
            answer = await http.post(path, content=b"x" * 80_000)
            assert answer.status_code == 429
            assert "more than 250,000 bytes together" in answer.json()["error"]["message"]
        assert (await http.post("/v1/completions", content=b"x" * 60_000)).text == "60000"
        at_once = asyncio.Event()
        at_once.set()
        refused = await sending(port, "/nnsight/v1/runs", [b"x" * 80_000], at_once)
        assert (refused.status_code, refused.text[:20]) == (429, "the requests and edi")
        released.set()
        assert [answer.text for answer in await asyncio.gather(*going)] == ["90001", "90001"]
        assert (await http.post("/v1/completions", content=b"x" * 80_000)).text == "80000"
    assert uploads.held("key") == 0


async def test_bytes_are_free_before_the_end_of_the_answer_is_sent(uploads: Uploads) -> None:
    """Whoever has an answer may send as much again at once, though the server has still to come to its end."""
    held: list[int] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"x" * 100, "more_body": False}

    async def send(message: Any) -> None:
        held.append(uploads.held("key"))

    headers = [(b"authorization", f"Bearer {KEY}".encode()), (b"content-length", b"100")]
    scope = {"type": "http", "path": "/v1/completions", "headers": headers}
    await Gate(app, single(KEY), None, uploads, MOST)(scope, receive, send)
    assert held == [100, 0]
    assert uploads.held("key") == 0


@pytest.mark.parametrize(
    "value", [torch.zeros(plain.MOST + 1), [torch.zeros(plain.MOST), 1], torch.zeros(plain.MOST + 1, 0)]
)
def test_json_has_so_many_numbers(value: Any) -> None:
    with pytest.raises(ValueError, match="numbers; as JSON"):
        plain.saved({"x": value})
    assert plain.saved({"x": torch.ones(2)}) == {"x": [1.0, 1.0]}


@pytest.mark.parametrize("room", [255, 256])
async def test_vectors_of_an_edit_count_as_what_its_key_has_sent(room: int) -> None:
    installed: list[Any] = []

    async def ainstall(edit: Any) -> None:
        installed.append(edit)

    vector = Vector.of(torch.ones(64))
    edit = of_operations((Op("steer", "layers.0", vector, 1.0, 0.0), Op("steer", "layers.1", vector, 2.0, 0.0)), "calm")
    engine: Any = SimpleNamespace(edits=SimpleNamespace(installed=installed))
    model: Any = SimpleNamespace(ainstall=ainstall)
    uploads = Uploads(room)
    edits = ServedEdits(model, engine, uploads, 5)
    if room < 256:
        with pytest.raises(Refused):
            await edits.install(edit, ANYONE)
        assert not installed
    else:
        await edits.install(edit, ANYONE)
        assert uploads.held(ANYONE.name) == 256
