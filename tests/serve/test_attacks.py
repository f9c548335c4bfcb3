"""What people on the network may try: refused with a reason or survived, nothing executed, nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest
import torch

from nnsight_async import VLLM, CaptureError, ServerError, ShippingError
from nnsight_async.capture.load import VERSION as PYTHON
from nnsight_async.runs.carried import rebuilt
from nnsight_async.runs.shipment import KEY
from nnsight_async.serve import messages as m
from nnsight_async.serve import wire
from nnsight_async.serve.server import Server
from nnsight_async.testing.engine import drained
from nnsight_async.tree.manifest import Manifest, ModuleInfo
from tests.conftest import LONG as FOR_LONG
from tests.serve.conftest import LIMITS, key

PROMPT = [5, 17, 101, 9, 33, 250, 77]
TYPED = {"content-type": wire.CONTENT_TYPE}


@pytest.fixture(autouse=True)
async def nothing_is_left(vllm_model: VLLM) -> Any:
    yield
    await drained(vllm_model)
    assert vllm_model.edits == ()


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key(name)}"}


@pytest.fixture
async def http(guarded_server: Any) -> Any:
    async with httpx.AsyncClient(base_url=guarded_server.url, timeout=60) as client:
        yield client


_numbers = iter(range(1 << 30))


def a_run(**fields: Any) -> dict[str, Any]:
    identity = f"{next(_numbers):032x}"
    return {"type": "run", "id": identity, "prompt": PROMPT, "sampling": {"max_tokens": 2}, **fields}


async def sent(
    http: httpx.AsyncClient, asked: Any, name: str = "ann", path: str = "/nnsight/v1/runs"
) -> httpx.Response:
    content = asked if isinstance(asked, bytes) else wire.encode(asked)
    return await http.post(path, content=content, headers={**TYPED, **bearer(name)})


def reason(answer: httpx.Response) -> str:
    return answer.json()["error"]["message"]


async def said(answer: httpx.Response) -> list[Any]:
    async def whole() -> Any:
        yield answer.content

    return [received.body async for received in wire.messages(whole(), m.replies, wire.Bounds())]


class Bomb:
    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/nnsight/v1/model", "/nnsight/v1/edits", "/v1/models", "/metrics", "/docs", "/load"])
@pytest.mark.parametrize(
    "given",
    [
        None,
        "",
        "Bearer",
        "Bearer wrong",
        "Basic dGhlLWtleS1vZi1hbm4=",
        "Bearer the-key-of-an",
        "the-key-of-ann",
    ],
)
async def test_without_a_key_nothing_is_there(http, path, given):
    headers = {} if given is None else {"authorization": given}
    answer = await http.get(path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "key" in reason(answer)


async def test_health_and_the_page_ask_for_no_key(http):
    assert (await http.get("/health")).status_code == 200
    page = await http.get("/")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]


@pytest.mark.parametrize(
    "path", ["/collective_rpc", "/v1/load_lora_adapter", "/invocations", "/sleep", "/scale_elastic_ep", "/nothing"]
)
async def test_paths_of_vllm_that_change_the_engine_ask_for_admin(http, path):
    answer = await http.post(path, json={}, headers=bearer("ben"))
    assert answer.status_code == 403
    assert "'admin'" in reason(answer)


@pytest.mark.parametrize(
    "path",
    [
        "//nnsight/v1/model",
        "/health/../nnsight/v1/model",
        "/%2e%2e/nnsight/v1/model",
        "/health/..%2fmetrics",
        "/HEALTH",
    ],
)
async def test_no_other_way_of_writing_a_path_goes_round_the_key(http, guarded_server, path):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(guarded_server.url.rpartition(":")[2]))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    status = (await reader.readline()).decode()
    assert status.split()[1] == "401"
    writer.close()


async def test_scopes_are_kept_apart(http, guarded_server, llama):
    edit = {"type": "edit", "id": "a" * 32, "block": {"type": "declared", "statements": []}}
    answer = await sent(http, edit, "eve", "/nnsight/v1/edits")
    assert answer.status_code == 403
    assert "'edit'" in reason(answer)
    python = a_run(block={"type": "python"})
    answer = await sent(http, wire.encode(python, [torch.zeros(3, dtype=torch.uint8)]), "ann")
    assert answer.status_code == 403
    assert "'python'" in reason(answer)
    assert (await http.get("/nnsight/v1/stats", headers=bearer("ben"))).status_code == 403
    assert (await http.get("/nnsight/v1/stats", headers=bearer("root"))).json()["runs"] == 0
    with pytest.raises(ServerError, match="key"):
        VLLM(llama, serve=guarded_server.url, dispatch=True)
    with pytest.raises(ServerError) as raised:
        VLLM(llama, serve=guarded_server.url, api_key="not-the-key", dispatch=True)
    assert raised.value.status == 401


async def test_an_edit_is_ended_by_its_maker_or_an_admin(guarded_server, http, llama):
    def probe(model, tracer):
        seen = model.samples[0, 0].save()

    models = {
        name: VLLM(llama, mode="async", serve=guarded_server.url, api_key=key(name)) for name in ("ann", "ben", "root")
    }
    edit = await models["ann"].edit(probe, name="anns")
    number = msgspec.msgpack.decode(
        (await http.get("/nnsight/v1/edits", headers=bearer("ben"))).content, type=list[m.EditInfo]
    )[0]
    assert (number.name, number.own) == ("anns", False)
    answer = await http.delete(f"/nnsight/v1/edits/{number.number}", headers=bearer("ben"))
    assert answer.status_code == 403
    await models["ben"].clear_edits()  # all of one's own
    (output,) = await models["ben"].generate([PROMPT], max_tokens=1)
    assert "seen" in output.saves
    await models["root"].clear_edits()
    (output,) = await models["ben"].generate([PROMPT], max_tokens=1)
    assert output.saves == {}
    await edit.clear()  # again does nothing
    for name in ("a", "b"):
        await models["ann"].edit(probe, name=name)
    with pytest.raises(ServerError, match="2 edits"):
        await models["ann"].edit(probe, name="c")
    await models["ann"].clear_edits()
    for model in models.values():
        model.close()


async def test_edits_of_a_key_have_so_many_bytes(http, guarded_server):
    """They stay after the request that has brought them."""
    tensor = torch.zeros(230_000)
    let = {"kind": "let", "name": "x", "value": value([wire.TENSOR, 0, "float32", [230_000]])}

    async def installed(number: int) -> httpx.Response:
        edit = {"type": "edit", "id": f"{number:032x}", "name": str(number)}
        asked = {**edit, "block": {"type": "declared", "statements": [let]}}
        return await sent(http, wire.encode(asked, [tensor]), "ann", "/nnsight/v1/edits")

    assert (await installed(0xED1)).status_code == 200
    refused = await installed(0xED2)
    assert refused.status_code == 429
    assert "2,621,440 bytes together" in reason(refused)
    assert guarded_server.service.uploads.held("ann") > tensor.nbytes
    await http.delete("/nnsight/v1/edits", headers=bearer("ann"))
    assert guarded_server.service.uploads.held("ann") == 0
    assert (await installed(0xED3)).status_code == 200
    await http.delete("/nnsight/v1/edits", headers=bearer("ann"))


async def test_what_an_edit_says_is_its_makers_to_hear(guarded_server, http, llama, capfd):
    def tells(model, tracer):
        import warnings

        print("a secret of ben's")
        warnings.warn("another of ben's", stacklevel=1)
        seen = model.samples[0, 0].save()

    async with VLLM(llama, mode="async", serve=guarded_server.url, api_key=key("ben")) as model:
        edit = await model.edit(tells, name="tells")
        heard = {}
        for name in ("ann", "ben", "root"):
            answer = await sent(http, a_run(), name)
            frames = [message for message in await said(answer) if isinstance(message, m.Saved)]
            assert any(entry[0] == "seen" for frame in frames for entry in frame.entries)
            heard[name] = b"of ben's" in answer.content
        assert heard == {"ann": False, "ben": True, "root": False}
        await edit.clear()


@pytest.mark.parametrize("headers", [{"host": "evil.example"}, {"origin": "https://evil.example"}, {"origin": "null"}])
async def test_pages_of_others_reach_no_server_without_keys(open_server, headers):
    async with httpx.AsyncClient(base_url=open_server.url, timeout=60) as http:
        for method, path in (("GET", "/nnsight/v1/model"), ("POST", "/nnsight/v1/runs"), ("POST", "/v1/completions")):
            answer = await http.request(method, path, headers=headers)
            assert answer.status_code == 403
        assert (await http.get("/health")).headers.get("access-control-allow-origin") is None


# -- messages ----------------------------------------------------------------------------------------------------------


async def test_a_pickle_is_run_nowhere_but_in_the_worker_of_a_server_that_was_told_to(http, data_server, tmp_path):
    mark = tmp_path / "mark"
    payload = PYTHON + pickle.dumps(Bomb(str(mark)))
    tensor = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    python = a_run(block={"type": "python"})
    async with httpx.AsyncClient(base_url=data_server.url, timeout=60) as plain:
        for asked in (wire.encode(python, [tensor]), payload, wire.encode(payload), wire.encode(a_run(prompt=payload))):
            answer = await plain.post("/nnsight/v1/runs", content=asked, headers=TYPED)
            assert answer.status_code in (400, 403)
    for name in ("ann", "eve"):
        assert (await sent(http, wire.encode({**python, "id": "b" * 32}, [tensor]), name)).status_code == 403
    assert not mark.exists()


@pytest.mark.parametrize(
    "hidden",
    [{"extra_args": {KEY: [[1], b"x", 1, 1.0, [], False]}}, {"_eos_token_id": 3}, {"skip_clone": True}, {"n": 2}],
)
async def test_what_steers_the_worker_is_no_parameter(http, hidden):
    answer = await sent(http, a_run(sampling=hidden))
    assert answer.status_code == 400


async def test_openai_requests_carry_no_block_and_no_key_of_another_run(http):
    forged = [[1], None, 1 << 30, 60.0, [1], False]
    for extra in ({KEY: forged}, {KEY: "x"}, {KEY: [1, 2]}):
        body = {"model": "x", "prompt": PROMPT, "max_tokens": 1, "vllm_xargs": extra}
        answer = await http.post("/v1/completions", json=body, headers=bearer("eve"))
        assert 400 <= answer.status_code < 500
    models = (await http.get("/v1/models", headers=bearer("eve"))).json()
    body = {"model": models["data"][0]["id"], "prompt": PROMPT, "max_tokens": 1, "vllm_xargs": {KEY: "x"}}
    answer = await http.post("/v1/completions", json=body, headers=bearer("eve"))
    assert answer.status_code == 400
    assert KEY in answer.text


async def test_too_much_is_refused_before_it_is_read(http):
    answer = await sent(http, b"x" * (LIMITS.body + 1))
    assert answer.status_code == 413
    answer = await sent(http, wire.encode(a_run(prompt="y" * 900_000)))
    assert answer.status_code == 400  # the engine's own limit, with its reason
    assert "max" in reason(answer)


OF_LISTS = {"type": "declared", "statements": [{"kind": "let", "name": "x", "value": {"kind": "value", "value": [[]]}}]}
OF_LISTS["statements"][0]["value"]["value"] *= 500_000


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (b"", "head"),
        (b"nns\x02" + bytes(8), "version 2"),
        (wire.encode({"type": "walk"}), "malformed"),
        (wire.encode({"type": "run"}), "malformed"),
        (wire.encode({**a_run(), "more": 1}), "malformed"),
        (wire.encode({**a_run(), "id": "../../etc/passwd"}), "malformed"),
        (wire.encode({**a_run(), "prompt": [1, "a"]}), "malformed"),
        (wire.encode({**a_run(), "prompt": [1 << 40]}), "malformed"),
        (wire.encode({**a_run(), "prompt": [-1]}), "malformed"),
        (wire.encode({**a_run(), "prompt": []}), "empty"),
        (wire.encode({**a_run(), "edits": ["no-such"]}), "no-such"),
        (wire.encode({**a_run(), "lora": "/etc/passwd"}), "no adapter"),
        (wire.encode({**a_run(), "block": {"type": "declared", "statements": [{"kind": "exec"}]}}), "malformed"),
        (wire.encode({**a_run(), "block": {"type": "declared", "statements": [1]}}), "malformed"),
        (wire.encode(a_run(), [torch.zeros(3)]), "more buffers"),
        (wire.encode(a_run(sampling={"stop": [[]] * 500_000})), "malformed"),
        (wire.encode(a_run(sampling={"stop": [""] * 300_000})), "length <= 262144"),
        (wire.encode(a_run(sampling={f"{number}": 1 for number in range(101)})), "length <= 100"),
        (wire.encode(a_run(sampling={"seed": {"a": []}})), "malformed"),
        (wire.encode(a_run(names=[""] * 10_001)), "length <= 10000"),
        (wire.encode(a_run(edits=[""] * 10_001)), "length <= 10000"),
        (wire.encode(a_run(block=OF_LISTS)), "more than 200,000 values"),
        (
            wire.encode(a_run(block={"type": "declared", "statements": msgspec.Raw(b"\xdd\xff\xff\xff\xff")})),
            "malformed",
        ),
        (wire.encode(a_run(sampling={"stop": msgspec.Raw(b"\xdd\xff\xff\xff\xff")})), "malformed"),
    ],
)
async def test_malformed_requests_are_answered_with_a_reason(http, asked, why):
    answer = await sent(http, asked)
    assert answer.status_code == 400
    assert why in reason(answer)


def statement(expression: Any) -> dict[str, Any]:
    return {"kind": "save", "name": "x", "value": expression}


def value(content: Any) -> dict[str, Any]:
    return {"kind": "value", "value": content}


LAYER = {"kind": "read", "part": "output", "path": "model.layers.0"}


@pytest.mark.parametrize(
    "expression",
    [
        {"kind": "method", "name": "__class__", "of": LAYER},
        {"kind": "method", "name": "numpy", "of": LAYER},
        {"kind": "method", "name": "share_memory_", "of": LAYER},
        {"kind": "method", "name": "expand", "of": LAYER, "arguments": [value(1)]},
        {"kind": "method", "name": "sum", "of": LAYER, "keywords": {"out": LAYER}},
        {"kind": "attribute", "name": "grad_fn", "of": LAYER},
        {"kind": "attribute", "name": "__dict__", "of": LAYER},
        {"kind": "function", "name": "eval", "arguments": [value("1")]},
        {"kind": "function", "name": "open", "arguments": [value("/etc/passwd")]},
        {"kind": "read", "part": "output", "path": "model.__class__"},
        {"kind": "read", "part": "output", "path": "../.."},
        {"kind": "read", "part": "weight", "path": "model.layers.0"},
        {"kind": "apply", "path": "model.layers.0.self_attn", "arguments": [LAYER]},
        {"kind": "apply", "path": "model.layers.0", "arguments": [LAYER]},
        {"kind": "apply", "path": "model", "arguments": []},
    ],
)
async def test_a_block_of_data_names_nothing_but_what_it_may(http, expression):
    block = {"type": "declared", "statements": [statement(expression)]}
    answer = await sent(http, a_run(block=block))
    assert answer.status_code == 400, answer.content


def nested(depth: int) -> Any:
    inner: Any = value(1)
    for _ in range(depth):
        inner = {"kind": "negative", "of": inner}
    return inner


@pytest.mark.parametrize(
    "statements", [[statement(nested(100))], [statement(value(1))] * 3000, [{"kind": "steps", "body": []}] * 3000]
)
async def test_a_block_of_data_has_an_end(http, statements):
    answer = await sent(http, a_run(block={"type": "declared", "statements": statements}))
    assert answer.status_code == 400


def grown(sign: str, left: Any, right: Any, times: int) -> list[Any]:
    x = {"kind": "variable", "name": "x"}
    grows = {"kind": "let", "name": "x", "value": {"kind": "binary", "sign": sign, "left": left, "right": right}}
    return [
        {"kind": "let", "name": "x", "value": value(3)},
        *[grows] * times,
        {"kind": "save", "name": "x", "value": x},
    ]


X = {"kind": "variable", "name": "x"}
HIDDEN = {"kind": "item", "of": LAYER, "keys": [value(0)]}
OUTER = {
    "kind": "let",
    "name": "x",
    "value": {"kind": "method", "name": "outer", "of": X, "arguments": [X]},
}
FLAT = {"kind": "let", "name": "x", "value": {"kind": "method", "name": "flatten", "of": X}}
FIRST = {
    "kind": "let",
    "name": "x",
    "value": {"kind": "item", "of": {"kind": "item", "of": LAYER, "keys": [value(0)]}, "keys": [value(0)]},
}
JOINED = {
    "kind": "let",
    "name": "x",
    "value": {"kind": "function", "name": "cat", "arguments": [{"kind": "display", "items": [X] * 50}]},
}


MORE = {"kind": "let", "value": {"kind": "binary", "sign": "+", "left": X, "right": value(1)}}
LONG = {"kind": "method", "name": "long", "of": {"kind": "method", "name": "abs", "of": X}}


STAYS_SMALL = {
    "integers": "more than 4096 bits",
    "products": "elements; a block",
    "joined": "elements; a block",
    "text": "not str",
    "lists": "in one another",
    "itself": "in one another",
    "chosen": "elements; a block",
    "embedded": "elements; a block",
    "listed": "goes through at most",
    "held": "may hold 268,435,456 at a time",
}


@pytest.mark.parametrize(
    ("statements", "why"),
    list(
        zip(
            [
                grown("*", X, X, 40),
                [FIRST, FLAT, JOINED, OUTER, FLAT, OUTER, FLAT, OUTER],
                [FIRST, FLAT, *[JOINED] * 6],
                [
                    {
                        "kind": "let",
                        "name": "x",
                        "value": {"kind": "binary", "sign": "*", "left": value("y"), "right": value(1 << 40)},
                    }
                ],
                [FIRST, *[{"kind": "let", "name": "x", "value": {"kind": "display", "items": [X, X]}}] * 40],
                [
                    {"kind": "let", "name": "x", "value": {"kind": "display"}},
                    {"kind": "do", "value": {"kind": "method", "name": "append", "of": X, "arguments": [X]}},
                    statement(X),
                ],
                [FIRST, FLAT, *[JOINED] * 3, statement({"kind": "item", "of": HIDDEN, "keys": [LONG]})],
                [
                    FIRST,
                    FLAT,
                    *[JOINED] * 3,
                    statement({"kind": "apply", "path": "model.embed_tokens", "arguments": [LONG]}),
                ],
                [FIRST, FLAT, *[JOINED] * 3, statement({"kind": "function", "name": "list", "arguments": [X]})],
                [FIRST, FLAT, *[JOINED] * 3, *[{**MORE, "name": f"y{number}"} for number in range(4)]],
            ],
            STAYS_SMALL.values(),
            strict=True,
        )
    ),
    ids=STAYS_SMALL,
)
async def test_a_block_of_data_stays_small(http, statements, why):
    """What would take gigabytes ends with an error of its own run."""
    answer = await sent(http, a_run(block={"type": "declared", "statements": statements}))
    assert answer.status_code == 200
    *_, failed, ended = await said(answer)
    assert isinstance(ended, m.Ended)
    assert why in str(rebuilt(failed.error))


async def test_a_constant_is_what_its_digest_says(http):
    content = torch.zeros(8, dtype=torch.uint8)
    asked = a_run(block={"type": "python", "constants": [bytes(32)]})
    answer = await sent(http, wire.encode(asked, [content, content]), "ben")
    assert answer.status_code == 400
    assert "digest" in reason(answer)


async def test_a_run_is_made_once(http):
    asked = wire.encode(a_run())
    first, second = await sent(http, asked), await sent(http, asked)
    assert (first.status_code, second.status_code) == (200, 409)
    assert (await sent(http, asked, "ben")).status_code == 200  # another's identity is another's
    assert "already" in reason(second)


async def test_a_request_of_a_form_is_none(http, open_server):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = await http.post(
            "/nnsight/v1/runs", content=wire.encode(a_run()), headers={**bearer("ann"), "content-type": kind}
        )
        assert answer.status_code == 415
        answer = await http.post("/nnsight/v1/stream", content=b"{}", headers={**bearer("ann"), "content-type": kind})
        assert answer.status_code == 415


# -- time --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hasty_server(vllm_model: VLLM) -> Iterator[Server]:
    with Server(vllm_model, limits=replace(LIMITS, head_seconds=1.0, upload_seconds=1.0)) as server:
        yield server


async def test_who_dawdles_is_let_go(hasty_server):
    port = int(hasty_server.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health HTTP/1.1\r\nX: ")
    async with asyncio.timeout(60):
        assert await reader.read() == b""  # the head never came
    writer.close()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /nnsight/v1/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {wire.CONTENT_TYPE}\r\n"
    writer.write(f"{head}Content-Length: 1000\r\n\r\nnns".encode())
    async with asyncio.timeout(60):
        assert b" 408 " in await reader.readline()
    writer.close()


async def test_a_key_has_so_many_runs_at_a_time(guarded_server, vllm_model, llama):
    async with VLLM(llama, mode="async", serve=guarded_server.url, api_key=key("ann")) as model:
        tracers = []
        for _ in range(LIMITS.runs):
            async with model.trace(PROMPT, **FOR_LONG) as tracer:
                x = model.samples.save()
            tracers.append(tracer)
        streams = [tracer.stream() for tracer in tracers]
        for stream in streams:
            await anext(stream)
        waiting = asyncio.ensure_future(model.generate([PROMPT], max_tokens=1))  # one client does not ask for more
        async with VLLM(llama, mode="async", serve=guarded_server.url, api_key=key("ann")) as another:
            with pytest.raises(ServerError, match="8 runs going") as raised:
                await another.generate([PROMPT], max_tokens=1)
        assert raised.value.status == 429
        assert not waiting.done()
        async with VLLM(llama, mode="async", serve=guarded_server.url, api_key=key("ben")) as other:
            await other.generate([PROMPT], max_tokens=1)
        for tracer in tracers:
            await tracer.cancel()
        (output,) = await waiting
        assert output.finished


async def leave(port: int, body: bytes, after: int) -> None:
    """Begin a run, read that many bytes of it, and go without a word."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /nnsight/v1/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {wire.CONTENT_TYPE}\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    if after:
        await reader.readexactly(after)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))
    writer.close()


async def all_leave(server: Any, model: VLLM, count: int) -> None:
    port = int(server.url.rpartition(":")[2])
    block = {
        "type": "declared",
        "statements": [
            {"kind": "steps", "body": [statement({"kind": "read", "part": "resid_post", "path": "model.layers.2"})]}
        ],
    }
    bodies = [wire.encode(a_run(block=block, sampling=FOR_LONG)) for _ in range(count)]
    for start in range(0, count, 50):
        await asyncio.gather(
            *(leave(port, body, (0, 20, 500)[at % 3]) for at, body in enumerate(bodies[start : start + 50]))
        )
    await drained(model)
    assert server.service.going.total() == 0
    (output,) = await model.generate([PROMPT], max_tokens=2)
    assert output.finished


async def test_fifty_who_leave_in_the_middle(open_server, vllm_model):
    await all_leave(open_server, vllm_model, 50)


@pytest.mark.slow
async def test_a_thousand_who_leave_in_the_middle(open_server, vllm_model):
    await all_leave(open_server, vllm_model, 1000)


# -- servers -----------------------------------------------------------------------------------------------------------


class Answers(asyncio.Protocol):
    """A server that says the same whatever it is asked."""

    answer = b""
    description = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        answer = self.description if data.startswith(b"GET /nnsight/v1/model") else self.answer
        self.transport.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(answer)}\r\n\r\n".encode() + answer)


async def test_a_client_unpickles_nothing_whatever_a_server_says(llama, tmp_path):
    mark = tmp_path / "mark"
    bomb = pickle.dumps((Bomb(str(mark)), None))
    failure = msgspec.msgpack.encode(
        ["ValueError", "boom", [["/etc/passwd", 1, "f"]], [], bomb, None, None, "builtins", ["boom"]]
    )
    saved = m.Saved(0, [], True, False, False, failure, "", [], 0, 0, 0)
    answers = [
        (wire.encode(m.Begun([])) + wire.encode(m.Failed(failure)) + wire.encode(m.Ended()), ValueError),
        (wire.encode(m.Begun([])) + wire.encode(saved) + wire.encode(m.Ended()), Exception),
        (bomb, ServerError),
        (wire.encode(bomb), ServerError),
        (wire.encode(m.Failed(bomb)), ValueError),
        (wire.encode(m.Ended()), ServerError),
        (b"", ServerError),
    ]
    manifest = Manifest("x", "0", {"": ModuleInfo("", "Model", "Model")})
    Answers.description = msgspec.msgpack.encode(m.Description(llama, manifest.encode(), True, (3, 11), 4, 1 << 20))
    server = await asyncio.get_running_loop().create_server(Answers, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for answer, expected in answers:
        Answers.answer = answer
        model = VLLM(llama, mode="async", serve=url)
        with pytest.raises(expected):
            await model.generate([PROMPT])
        await asyncio.to_thread(model.close)
    server.close()
    assert not mark.exists()


async def test_a_block_made_by_another_python_is_refused(guarded_server, http):
    payload = torch.tensor([2, 7, 1], dtype=torch.uint8)
    answer = await sent(http, wire.encode(a_run(block={"type": "python"}), [payload]), "ben")
    failed = next(message for message in await said(answer) if isinstance(message, m.Failed))
    error = rebuilt(failed.error)
    assert isinstance(error, ShippingError)
    assert "Python 2.7" in str(error)


async def test_errors_say_no_more_than_they_must(data_server, llama):
    """Of a block of data nobody hears where the server has its files."""
    async with VLLM(llama, mode="async", serve=data_server.url) as model:
        async with model.trace(PROMPT) as tracer:
            print("here")
        with pytest.raises(CaptureError, match="takes blocks of declared operations alone"):
            await tracer.result
    async with httpx.AsyncClient(base_url=data_server.url, timeout=60) as http:
        block = {"type": "declared", "statements": [statement({"kind": "variable", "name": "unbound"})]}
        answer = await http.post("/nnsight/v1/runs", content=wire.encode(a_run(block=block)), headers=TYPED)
        assert b"site-packages" not in answer.content
        assert b"nnsight_async/serve" not in answer.content
        assert b"unbound" in answer.content


async def test_json_is_checked_as_well(data_server):
    async with httpx.AsyncClient(base_url=data_server.url, timeout=60) as http:
        for body in (b"[]", b"{", b'{"prompt": 1}', b'{"prompt": "x", "more": 1}', b"[" * 100_000, json.dumps(
            {"prompt": "x", "statements": [statement({"kind": "function", "name": "eval"})]}).encode()):  # fmt: skip
            answer = await http.post("/nnsight/v1/stream", content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 400
