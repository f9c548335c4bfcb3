"""A minute of messages and requests that nobody has thought of: taken for what they say, or refused with a reason."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import linecache
import tracemalloc
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import torch
from fastapi import FastAPI

from nnsight_async import NNsightError
from nnsight_async.capture.load import load
from nnsight_async.engine.sampling import settings as sampling_of
from nnsight_async.runs.carried import known, rebuilt
from nnsight_async.runs.declaring import Declaring
from nnsight_async.serve import access, plain, wire
from nnsight_async.serve import messages as m
from nnsight_async.serve import operations as ops
from nnsight_async.serve.access import Gate
from nnsight_async.serve.app import Service, router
from nnsight_async.serve.block import of_probe
from nnsight_async.serve.held import Room
from nnsight_async.serve.ops import Change, Operations, Slice, Vector
from nnsight_async.serve.policy import Policy, ServerLimits
from nnsight_async.serve.program import Program
from nnsight_async.serve.wire import Bounds, WireError
from nnsight_async.tree.envoy import Envoy
from tests.serve import drawn
from tests.serve.drawn import Draw
from tests.serve.fuzzing import breaking, fuzz, fuzzed
from tests.serve.test_program import MANIFEST, MODEL, ran
from tests.serve.test_source import DESCRIPTION, resolve
from tests.serve.test_wire import received, sent

SMALL = Bounds(header=1 << 16, total=1 << 20, items=1000, depth=16)
ROOM = Room(own=1 << 24, together=1 << 28)
KEY = "the-key-of-the-fuzzer"
ADMIN = "the-key-of-an-admin"
TYPED = "application/vnd.nnsight"

TYPED_ERRORS = (TypeError, ValueError, LookupError, AttributeError, NNsightError)
"""What a server answers with 400."""


# -- messages ----------------------------------------------------------------------------------------------------------


def is_taken_for_what_it_says(data: bytes) -> None:
    """What is read of some bytes is what is read of it when it is sent on; it is no more than they were."""
    try:
        value = received(data, SMALL)
    except WireError:
        return
    assert same(received(sent(value)), value)
    assert tensor_bytes(value) <= len(data)


def same(one: Any, other: Any) -> bool:
    """Whether two values are one: of the same types, NaN as itself, tensors by their bytes."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and content_of(one) == content_of(other)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one), list(other)) and same(list(one.values()), list(other.values()))
    return type(one) is type(other) and (repr(one) == repr(other) if isinstance(one, float) else one == other)


def content_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def tensor_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, (list, tuple)):
        return sum(map(tensor_bytes, value))
    return sum(map(tensor_bytes, (*value, *value.values()))) if isinstance(value, dict) else 0


@fuzzed
def test_values_come_back(number: int) -> None:
    def check(value: Any) -> None:
        assert same(received(sent(value)), value)

    fuzz(number, 4000, Draw.value, check)


@fuzzed
def test_what_is_mostly_no_value(number: int) -> None:
    def check(given: tuple[Any, list[torch.Tensor]]) -> None:
        is_taken_for_what_it_says(wire.encode(*given))

    fuzz(number, 8000, lambda draw: (draw.packed(), draw.some(draw.tensor, 2)), check)


def corpus_of_values() -> list[bytes]:
    values: list[Any] = [
        [1, {"a": (2.5, None)}, b"x", "text"],
        torch.arange(6.0).view(2, 3),
        {"t": [torch.ones(2, dtype=torch.bool)]},
        1 << 80,
        [[[[[]]]]],
        {(1, "a"): torch.zeros(0, 3, dtype=torch.bfloat16)},
    ]
    return list(map(sent, values))


@fuzzed
def test_broken_messages(number: int) -> None:
    fuzz(number, 20_000, breaking(corpus_of_values()), is_taken_for_what_it_says)


@fuzzed
def test_a_message_takes_no_more_memory_than_its_length_allows(number: int) -> None:
    corpus = [*corpus_of_values(), wire.encode([0] + [[0]] * 300), wire.encode(msgspec.Raw(b"\x91" * 2000 + b"\xc0"))]
    tracemalloc.start()
    try:
        fuzz(number, 1500, breaking(corpus), takes_little_memory)
    finally:
        tracemalloc.stop()


def takes_little_memory(data: bytes) -> None:
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    is_taken_for_what_it_says(data)
    _, peak = tracemalloc.get_traced_memory()
    assert peak - before < (1 << 18) + 400 * len(data)


ERRORS = [
    msgspec.msgpack.encode(
        [
            "ValueError",
            "boom",
            [["f.py", 3, "f"]],
            ["note"],
            None,
            ["KeyError", "x", [], [], None],
            None,
            "builtins",
            ["boom"],
        ]
    )
]
REPLIES = [
    wire.encode(m.Begun([m.Part("a", "f.py", 3)])),
    wire.encode(
        m.Delta(
            "id",
            [1, 2],
            "ab",
            True,
            "stop",
            3,
            -1.5,
            [[(1, (-0.5, 1, "a"))]],
            "p",
            [1],
            [None, [(1, (-1.0, 2, None))]],
            0,
        )
    ),
    wire.encode(
        m.Saved(
            0, [("x", "", [3, 0, "float32", [2]])], True, False, True, ERRORS[0], "p", [("w", "c", "f", 1)], 8, 0, 0
        ),
        [torch.ones(2)],
    ),
    wire.encode(m.Failed(ERRORS[0])),
    wire.encode(m.Alive()) + wire.encode(m.Ended()),
]


@fuzzed
def test_what_a_server_says_is_read_or_refused(number: int) -> None:
    async def one(data: bytes) -> None:
        async def pieces() -> Any:
            yield data[:7]
            yield data[7:]

        async for reply in wire.messages(pieces(), m.replies, SMALL):
            body = reply.body
            assert m.replies.decode(msgspec.msgpack.encode(body)) == body or "nan" in repr(body)
            if isinstance(body, m.Saved):
                for *_, value in body.entries:
                    reply.buffers.unpack(value)

    def read(data: bytes) -> None:
        with suppress(WireError):
            runner.run(one(data))

    with asyncio.Runner() as runner:
        fuzz(number, 4000, breaking(REPLIES), read)


@fuzzed
def test_errors_from_elsewhere_are_made_or_refused(number: int) -> None:
    def read(data: bytes) -> None:
        try:
            error = rebuilt(data)
        except ValueError:
            return
        assert isinstance(error, BaseException)
        str(error)

    fuzz(number, 4000, breaking(ERRORS), read)


# -- blocks of data ----------------------------------------------------------------------------------------------------


@fuzzed
def test_blocks_of_data_mean_what_they_say(number: int) -> None:
    fuzz(number, 800, Draw.program, means_what_it_says)


def means_what_it_says(statements: list[ops.Statement]) -> None:
    """A block that is sent does what it does where it is written; what is refused has a reason."""
    given, tensors = drawn.packed(statements)
    block = {"type": "declared", "statements": given}
    message = wire.encode(m.RunRequest("0" * 32, [1], block=block), tensors)  # type: ignore[arg-type]
    try:
        opened = m.take(message, Bounds())
        assert isinstance(opened.body, m.RunRequest)
        assert isinstance(opened.body.block, m.Declared)
        arrived = m.statements_of(opened.body.block, opened.buffers)
        ops.check(arrived, MANIFEST)
    except TYPED_ERRORS:
        return
    again, content = drawn.packed(arrived)
    assert msgspec.msgpack.encode(again) == msgspec.msgpack.encode(given)
    assert all(same(one, other) for one, other in zip(content, tensors, strict=True))
    assert outcome(arrived) == outcome(copy.deepcopy(statements))


def outcome(statements: list[ops.Statement]) -> str:
    """What a block saves, as the client gets it, or its error."""
    try:
        with warnings.catch_warnings(action="ignore"):  # torch says some things once
            saved, logits = ran(Program(statements, ROOM))
    except Exception as error:  # of whatever kind: it is that run's, and other runs go on
        return f"{type(error).__name__}: {error}"
    for _, _, value in saved:
        sent(value)
        plain.told(value)
    return repr([(name, operation, value) for name, operation, value in saved]) + repr(logits)


@fuzzed
def test_blocks_of_data_as_json(number: int) -> None:
    fuzz(number, 2000, Draw.program, means_what_it_says_as_json)


def means_what_it_says_as_json(statements: list[ops.Statement]) -> None:
    simple = drawn.for_json(statements)
    try:
        body = msgspec.json.encode({"prompt": [1], "statements": simple})
        asked = plain.opened(body)
    except TYPED_ERRORS:
        return
    assert msgspec.json.encode(numbers_of(asked.statements)) == msgspec.json.encode(simple)


def numbers_of(statements: list[ops.Statement]) -> list[ops.Statement]:
    for node in ops.nodes(statements):
        if isinstance(node, ops.Value) and isinstance(node.value, torch.Tensor):
            node.value = node.value.tolist()
    return statements


# -- blocks of Python --------------------------------------------------------------------------------------------------

POLICY = Policy(MANIFEST, allow_python=True, loras={"adapter": "an adapter"}, max_model_len=64, room=ROOM)
PYTHON = access.Key("key", frozenset(["trace", "python"]))


@fuzzed
def test_values_around_a_text_are_the_same_in_the_worker(number: int) -> None:
    text = "def probe(model, tracer):\n    x = [y for _ in range(1)]\n    return y\n"
    linecache.cache["<fuzz>"] = (len(text), None, text.splitlines(keepends=True), "<fuzz>")
    made = compile(text, "<fuzz>", "exec")

    def check(value: Any) -> None:
        namespace: dict[str, Any] = {"y": value, "__name__": __name__}
        exec(made, namespace)
        code, tensors = of_probe(namespace["probe"], [MODEL, MANIFEST], MODEL).code(DESCRIPTION)
        message = wire.encode(m.RunRequest("0" * 32, [1], block=code), tensors)
        opened = m.take(message, ServerLimits().bounds)
        block = POLICY.block(opened.body.block, opened.buffers, [], PYTHON)  # type: ignore[union-attr,arg-type]
        assert same(load(block.payload, resolve)(None, None), value)

    fuzz(number, 1200, Draw.value, check)


@fuzzed
def test_texts_become_blocks_or_are_refused(number: int) -> None:
    def check(given: tuple[m.Source, list[bytes]]) -> None:
        source, buffers = given
        content = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in buffers if part]
        message = wire.encode(m.RunRequest("0" * 32, [1], block=source), content)
        try:
            opened = m.take(message, Bounds())
            block = POLICY.block(opened.body.block, opened.buffers, [], PYTHON)  # type: ignore[union-attr,arg-type]
        except TYPED_ERRORS:
            return
        assert block.payload[:2] == bytes(DESCRIPTION.python) or block.payload
        assert all(tensor_bytes(constant.content) <= len(message) for constant in block.constants)

    fuzz(number, 4000, lambda draw: (draw.source(), draw.some(lambda: draw.choice(drawn.BYTES), 3)), check)


# -- what is asked of vLLM ---------------------------------------------------------------------------------------------


@fuzzed
def test_sampling_parameters_can_be_sent_to_the_engine_or_are_refused(number: int) -> None:
    """vLLM's engine ends where it cannot decode a request."""
    from vllm import SamplingParams

    def check(given: dict[str, Any]) -> None:
        try:
            asked = msgspec.msgpack.decode(msgspec.msgpack.encode(given), type=m.Sampling)
            request = POLICY.request(m.RunRequest("0" * 32, [1], asked))
        except (*TYPED_ERRORS, OverflowError, msgspec.MsgspecError):
            return
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(request.params), type=SamplingParams)
        floats = msgspec.convert(msgspec.to_builtins(request.params), SamplingParams)  # where whole numbers were given
        assert again == floats or repr(again) == repr(floats)

    fuzz(number, 6000, Draw.sampling, check)


# -- routes ------------------------------------------------------------------------------------------------------------


class Edits:
    installed: list[Any] = []  # noqa: RUF012


class Engine:
    edits = Edits()


class Model(Declaring):
    """Ends every run that it is asked for, and remembers it."""

    repo = "toy"
    tree = Envoy(MANIFEST)
    taps = ("model.layers[1].output",)

    def __init__(self) -> None:
        self.launched: list[Any] = []
        self.installed: list[Any] = []

    async def alaunch(self, run: Any) -> None:
        self.launched.append(run)
        run.cancel()

    async def ainstall(self, edit: Any) -> None:
        self.installed.append(edit)

    async def uninstall(self, edits: Any) -> None:
        pass

    async def stats(self) -> dict[str, int]:
        return {"runs": 0}


class Site:
    """All of a server's routes, with no engine behind them."""

    def __init__(self) -> None:
        self.model = Model()
        limits = ServerLimits(body=1 << 20, runs=4, uploads=1 << 22, edits=1 << 30)
        model: Any = self.model
        engine: Any = Engine()
        self.service = Service(model, engine, POLICY, limits)
        app = FastAPI()
        app.include_router(router(self.service))
        keys = access.Keys(
            [
                access.Key("fuzzer", frozenset(["trace", "edit", "python"]), access._digest(KEY)),
                access.Key("admin", frozenset(access.SCOPES), access._digest(ADMIN)),
            ]
        )
        self.app = Gate(app, keys, None, self.service.uploads, limits.body)

    async def asked(self, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes) -> tuple[int, bytes]:
        """The status of an answer, and its body."""
        parts = [body[:9], body[9:]] if len(body) % 2 else [body]
        waiting = [
            {"type": "http.request", "body": part, "more_body": at + 1 < len(parts)} for at, part in enumerate(parts)
        ]
        said: list[Any] = []

        async def receive() -> Any:
            if waiting:
                return waiting.pop(0)
            return await asyncio.Event().wait()

        async def send(message: Any) -> None:
            said.append(message)

        target, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": target,
            "raw_path": target.encode(errors="replace"),
            "query_string": query.encode(errors="replace"),
            "headers": headers,
            "scheme": "http",
            "server": ("127.0.0.1", 80),
            "client": ("127.0.0.1", 1),
            "root_path": "",
            "state": {},
        }
        self.service._seen.clear()  # each is to be one that has not been asked before
        await self.app(scope, receive, send)
        status = said[0]["status"]
        return status, b"".join(message.get("body", b"") for message in said[1:])


def headers_of(kind: str, key: str = KEY) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {key}".encode()), (b"content-type", kind.encode())]


@pytest.fixture
def site() -> Iterator[Any]:
    with asyncio.Runner() as runner:
        made = Site()
        made.ask = lambda *given: runner.run(made.asked(*given))  # type: ignore[attr-defined]
        yield made
        assert made.service.going.total() == 0
        assert made.service.uploads.held("fuzzer") == 0


def is_refused(status: int, body: bytes) -> bool:
    """Whether an answer is no success; it must then be an error with a name and a reason."""
    if status < 300:
        return False
    assert 400 <= status < 500, (status, body)
    if status not in (404, 405):  # of no route
        error = json.loads(body)["error"]
        assert error["message"]
        assert any(name == error["kind"] for _, name in known()), error
    return True


def told(answer: bytes) -> list[m.Reply]:
    async def whole() -> Any:
        yield answer

    async def read() -> list[m.Reply]:
        return [reply.body async for reply in wire.messages(whole(), m.replies, Bounds())]

    return asyncio.run(read())


@fuzzed
def test_runs_are_run_as_they_are_asked_for_or_refused(number: int, site: Any) -> None:
    def check(given: tuple[dict[str, Any], list[torch.Tensor]]) -> None:
        fields, tensors = given
        try:
            body = wire.encode(fields, tensors)
        except (OverflowError, TypeError):
            return  # which MessagePack cannot hold
        site.model.launched.clear()
        status, answer = site.ask("POST", "/nnsight/v1/runs", headers_of(TYPED), body)
        if is_refused(status, answer):
            assert not site.model.launched
            return
        (run,) = site.model.launched
        assert fields["prompt"] in (run.request.prompt.get("prompt"), run.request.prompt.get("prompt_token_ids"))
        assert run.request.prompt.get("cache_salt") == fields.get("cache_salt")
        assert run.request.priority == fields.get("priority", 0)
        assert run.request.edits == (None if fields.get("edits") is None else tuple(fields["edits"]))
        assert run.request.lora == POLICY.loras.get(fields.get("lora"))
        assert list(run.names) == list(dict.fromkeys(fields.get("names", []))) or run.block is None
        assert (run.block is None) == (fields["block"] is None)
        assert repr(run.request.params) == repr(sampling_of(fields["sampling"], "trace()").params)

    fuzz(number, 2500, Draw.run, check)


@fuzzed
def test_edits_are_installed_as_they_are_sent_or_refused(number: int, site: Any) -> None:
    def check(given: tuple[dict[str, Any], list[torch.Tensor]]) -> None:
        fields, tensors = given
        try:
            body = wire.encode(fields, tensors)
        except (OverflowError, TypeError):
            return
        site.model.installed.clear()
        status, answer = site.ask("POST", "/nnsight/v1/edits", headers_of(TYPED), body)
        if is_refused(status, answer):
            assert not site.model.installed
            return
        (edit,) = site.model.installed
        assert (edit.name, edit.rowwise) == (fields.get("name"), fields["rowwise"])
        assert msgspec.msgpack.decode(answer, type=m.EditInfo).name == edit.name

    fuzz(number, 1500, Draw.edit, check)


@fuzzed
def test_json_is_run_as_it_is_asked_for_or_refused(number: int, site: Any) -> None:
    def check(fields: dict[str, Any]) -> None:
        site.model.launched.clear()
        body = json.dumps(fields, default=repr).encode()
        status, answer = site.ask("POST", "/nnsight/v1/stream", headers_of("application/json"), body)
        if is_refused(status, answer):
            assert not site.model.launched
            return
        (run,) = site.model.launched
        assert fields["prompt"] in (run.request.prompt.get("prompt"), run.request.prompt.get("prompt_token_ids"))
        assert (run.block is None) == (not fields["statements"])

    fuzz(number, 3000, Draw.plain_run, check)


def corpus_of_requests() -> list[bytes]:
    read = ops.Read("resid_post", "layers.1")
    body = [
        ops.Let("x", ops.Value(wire.pack(torch.ones(2), tensors := []))),
        ops.Save("y", ops.Binary("+", read, ops.Variable("x"))),
    ]
    steps: Any = {"type": "declared", "statements": [ops.Steps(body, 0, None)]}
    source = m.Source(
        "    x = [y]\n",
        "f.py",
        3,
        (2, 3),
        ["model", "tracer"],
        {"y": m.Value(msgspec.Raw(msgspec.msgpack.encode([0, 1, "a"])))},
        {"m": m.Module(["model"]), "t": m.Import("torch", "float16")},
        "f",
        "f",
    )
    sampling: Any = {"temperature": 0.5, "stop": ["a"], "logit_bias": {1: 0.5}, "seed": 3}
    digest = hashlib.sha256(torch.ones(4).numpy()).digest()
    change = Change("steer", "layers.0", 0, 0.5, None, Slice(1, None, 2))
    operations = Operations([Vector("float32", torch.ones(8).numpy().tobytes())], [change], [])
    return [
        wire.encode(m.RunRequest("0" * 32, "a prompt", sampling, ["known"], 1, None, "salt", ["y"], steps), tensors),
        wire.encode(m.RunRequest("1" * 32, [1, 2, 3], {"max_tokens": 3}, block=source)),
        wire.encode(m.RunRequest("2" * 32, [1], block=m.Python([digest])), [torch.ones(3), torch.ones(4)]),
        wire.encode(m.RunRequest("6" * 32, [1], ops=operations)),
        wire.encode(m.EditRequest("3" * 32, source, "name", True)),
        wire.encode(m.EditRequest("4" * 32, steps, None, False), tensors),
        wire.encode(m.EditRequest("5" * 32, None, "calm", ops=operations)),
    ]


@fuzzed
@pytest.mark.parametrize("path", ["runs", "edits"])
def test_broken_requests_are_taken_or_refused(number: int, path: str, site: Any) -> None:
    def check(body: bytes) -> None:
        site.model.launched.clear()
        site.model.installed.clear()
        status, answer = site.ask("POST", f"/nnsight/v1/{path}", headers_of(TYPED), body)
        started = [*site.model.launched, *site.model.installed]
        assert is_refused(status, answer) == (not started)

    corpus = corpus_of_requests()[4:] if path == "edits" else corpus_of_requests()[:4]
    for whole in corpus:
        assert site.ask("POST", f"/nnsight/v1/{path}", headers_of(TYPED), whole)[0] == 200
    fuzz(number, 3000, breaking(corpus), check)


NORM = {"kind": "method", "name": "norm", "of": {"kind": "read", "part": "output", "path": "layers.1"}}
LET = {"kind": "let", "name": "x", "value": {"kind": "value", "value": [1.5, 2]}}
JSON = [
    json.dumps({"prompt": "The capital", "sampling": {"max_tokens": 3}, "statements": [statement]}).encode()
    for statement in ({"kind": "save", "name": "x", "value": NORM}, LET)
]


@fuzzed
def test_broken_json_is_taken_or_refused(number: int, site: Any) -> None:
    def check(body: bytes) -> None:
        site.model.launched.clear()
        status, answer = site.ask("POST", "/nnsight/v1/stream", headers_of("application/json"), body)
        assert is_refused(status, answer) == (not site.model.launched)

    fuzz(number, 4000, breaking(JSON), check)


ROUTES = [
    "runs",
    "stream",
    "edits",
    "edits/1",
    "model",
    "tree",
    "stats",
    "edits/x",
    "edits/-1",
    f"edits/{10**30}",
    "",
    "runs/..",
    "edits/" + "9" * 5000,
    "edits/1.5",
    "edits/%00",
    "edits/\u0661",
    "edits/\ud800",
]
HEADERS = [
    b"authorization",
    b"content-type",
    b"content-length",
    b"host",
    b"origin",
    b"x",
    b"transfer-encoding",
    b"expect",
]
CONTENTS = [
    TYPED.encode(),
    b"application/json",
    b"application/json; charset=x",
    b"-1",
    b"0",
    b"9" * 30,
    b"Bearer",
    b"\xb2",
    b"",
    f"bearer  {KEY} ".encode(),
    f"Bearer {KEY}".encode(),
    f"Bearer {KEY[:-1]}".encode(),
]


def drawn_request(draw: Draw) -> tuple[str, str, list[tuple[bytes, bytes]], bytes]:
    headers = draw.some(lambda: (draw.choice(HEADERS), draw.choice(CONTENTS)), 4)
    if key := draw.choice([None, KEY, KEY, ADMIN, "wrong"]):
        headers.append((b"authorization", f"Bearer {key}".encode()))
    path = draw.choice(ROUTES) if draw.rarely(0.9) else draw.text()
    query = draw.choice(["", "", "?number=1", "?x=" + "y" * 100])
    method = draw.choice(["GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS", "PATCH", "TRACE", "x"])
    return method, f"/nnsight/v1/{path}{query}", headers, draw.choice([b"", b"{}", *JSON, *drawn.BYTES])


@fuzzed
def test_every_route_answers_whatever_it_is_asked(number: int, site: Any) -> None:
    def check(given: tuple[str, str, list[tuple[bytes, bytes]], bytes]) -> None:
        method, path, headers, body = given
        site.model.launched.clear()
        status, answer = site.ask(method, path, headers, body)
        if method != "HEAD":
            is_refused(status, answer)
        keys = [value.split()[-1:] for name, value in headers if name == b"authorization"]
        if not {KEY, ADMIN} & {key[0].decode("latin-1") for key in keys if key}:
            assert status == 401
            assert not site.model.launched

    fuzz(number, 5000, drawn_request, check)
