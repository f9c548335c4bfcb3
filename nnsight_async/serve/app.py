"""The routes of a server, beside those of vLLM."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from nnsight_async.errors import NNsightError
from nnsight_async.runs.carried import carry, known, rebuilt
from nnsight_async.runs.edit import Installed, of_operations
from nnsight_async.runs.failures import Failure
from nnsight_async.runs.ops import edit_ops, ops_of
from nnsight_async.runs.run import Run
from nnsight_async.serve import messages as m
from nnsight_async.serve import plain
from nnsight_async.serve.edits import ServedEdits
from nnsight_async.serve.ops import heard
from nnsight_async.serve.outline import outline
from nnsight_async.serve.policy import Policy, ServerLimits, opened
from nnsight_async.serve.relay import Relay
from nnsight_async.serve.uploads import Refused, Uploads, Vacancy
from nnsight_async.serve.wire import CONTENT_TYPE, WireError

if TYPE_CHECKING:
    from collections.abc import Generator

    from nnsight_async.capture.block import Block
    from nnsight_async.engine.engine import Engine
    from nnsight_async.serve.access import Key
    from nnsight_async.vllm import VLLM

T = TypeVar("T", m.RunRequest, m.EditRequest)

LARGE = 1 << 17
"""Bytes of a request from which on it is opened beside the engine's loop."""

REMEMBERED = 100_000
"""Identities of runs that are refused a second time."""


class Service:
    """What the routes share: one model, its policy, and who uses how much of it. Lives on the engine's loop."""

    def __init__(self, model: VLLM, engine: Engine, policy: Policy, limits: ServerLimits) -> None:
        self.model = model
        self.policy = policy
        self.limits = limits
        self.going: Counter[str] = Counter()
        """Runs by the name of their key."""
        self._room = Vacancy()
        self.uploads = Uploads(limits.uploads)
        self.edits = ServedEdits(model, engine, self.uploads, limits.edits)
        self._seen: OrderedDict[tuple[str, str], None] = OrderedDict()

    def once(self, key: Key, identity: str) -> None:
        """Refuse what has been asked before: who sends a request again because no answer came gets no second run."""
        if (key.name, identity) in self._seen:
            raise Refused(409, "ServerError", f"a request {identity} has been made already, and is not made again")
        self._seen[key.name, identity] = None
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)

    async def launch(self, run: Run, key: Key) -> None:
        """Start a run, one more of a key; `Refused` where that is too many."""
        await self._room.until(lambda: self.going[key.name] < self.limits.runs)
        if self.going[key.name] >= self.limits.runs:
            raise Refused(
                429, "ServerError", f"the key {key.name!r} has {self.limits.runs} runs going, and may have no more"
            )
        self.going[key.name] += 1
        run.ended.once(lambda: self._ended(key))
        await self.model.alaunch(run)

    def _ended(self, key: Key) -> None:
        self.going[key.name] -= 1
        self._room.freed()

    async def received(self, request: Request, kind: type[T], key: Key) -> tuple[T, Block | None]:
        """What a client asks, and its block; `Refused` for what is too large, too slow, none, or not allowed."""
        body = await self.body(request, CONTENT_TYPE)
        if len(body) < LARGE:
            return self._opened(body, kind, key)
        return await asyncio.to_thread(self._opened, body, kind, key)  # others' tokens are not to wait for it

    def _opened(self, body: bytes, kind: type[T], key: Key) -> tuple[T, Block | None]:
        received = opened(body, self.limits.bounds)
        asked = received.body
        if not isinstance(asked, kind):
            raise Refused(400, "ValueError", f"this is no {kind.__name__}")
        names = asked.names if isinstance(asked, m.RunRequest) else []
        block = None if asked.block is None else self.policy.block(asked.block, received.buffers, names, key)
        received.buffers.finish()
        return asked, block

    async def body(self, request: Request, kind: str, most: int | None = None) -> bytes:
        """The body of a request, whole. Of another type than a form's, which pages of others could send."""
        most = self.limits.body if most is None else min(most, self.limits.body)
        if request.headers.get("content-type", "").partition(";")[0].strip() != kind:
            raise Refused(415, "ValueError", f"the body of this request is of the type {kind}")
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.upload_seconds):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > most:
                        raise Refused(413, "ValueError", f"a request of more than {most:,} bytes")
        except ClientDisconnect:
            raise Refused(400, "ServerError", "the client has gone") from None
        except TimeoutError:
            raise Refused(
                408, "TimeoutError", f"the request took more than {self.limits.upload_seconds:g} s to arrive"
            ) from None
        return bytes(body)


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter(prefix="/nnsight/v1", tags=["nnsight"])

    description = msgspec.msgpack.encode(
        m.Description(
            model=service.model.repo,
            manifest=service.policy.manifest.encode(),
            allow_python=service.policy.allow_python,
            python=sys.version_info[:2],
            runs=service.limits.runs,
            uploads=service.limits.uploads,
            taps=list(service.model.taps),
        )
    )

    @routes.get("/model", summary="The module tree, and what this server takes")
    async def model() -> Response:  # pyright: ignore[reportUnusedFunction]
        return Response(description, media_type=CONTENT_TYPE)

    @routes.post("/runs", summary="Run a prompt with a block, and stream tokens and saved values")
    async def runs(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        with _answered() as answer:
            return await _run(service, request)
        return answer.response

    @routes.post("/stream", summary="The same as JSON, for a block of declared operations: server-sent events")
    async def stream(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        with _answered() as answer:
            return await _stream(service, request)
        return answer.response

    @routes.get("/tree", summary="Where the layers are, and what a logit lens is made of, as JSON")
    async def tree() -> Response:  # pyright: ignore[reportUnusedFunction]
        return Response(msgspec.json.encode(outline(service.policy.manifest)), media_type="application/json")

    @routes.get("/stats", summary="What runs hold now, and what there was since the start")
    async def stats(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        if not _key(request).may("admin"):
            return refusal(403, "PermissionError", "this asks for the scope 'admin'")
        return JSONResponse(await service.model.stats())

    _add_edits(routes, service)
    return routes


def _add_edits(routes: APIRouter, service: Service) -> None:
    @routes.get("/edits", summary="The edits that are installed")
    async def edits(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return Response(msgspec.msgpack.encode(service.edits.infos(_key(request))), media_type=CONTENT_TYPE)

    @routes.post("/edits", summary="Install an edit, which is its maker's")
    async def install(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        with _answered() as answer:
            return await _install(service, request)
        return answer.response

    @routes.delete("/edits/{number}", summary="End an edit of one's own; with the scope admin, any")
    async def clear(number: str, request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        with _answered() as answer:
            return await _clear(service, [_number(number)], request)
        return answer.response

    @routes.delete("/edits", summary="End all edits of one's own; with the scope admin, all")
    async def clear_all(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        with _answered() as answer:
            return await _clear(service, None, request)
        return answer.response


# -- runs --------------------------------------------------------------------------------------------------------------


async def _run(service: Service, request: Request) -> Response:
    key = _key(request)
    asked, block = await service.received(request, m.RunRequest, key)
    owns = functools.partial(service.edits.owns, key)
    wanted = service.policy.request(asked)
    if asked.ops is not None:
        wanted.ops = ops_of(heard(asked.ops, service.model), "trace()")
    relay = Relay(wanted, block, service.limits.waiting, owns)
    service.once(key, asked.id)
    await service.launch(relay, key)
    relay.begin()
    return Streamed(relay, relay.messages(service.limits.beat), CONTENT_TYPE, service.limits)


async def _stream(service: Service, request: Request) -> Response:
    key = _key(request)
    asked = plain.opened(await service.body(request, "application/json", plain.LONGEST))
    block = service.policy.block_of(asked.statements, []) if asked.statements else None
    told = m.RunRequest("0" * 32, asked.prompt, asked.sampling, asked.edits)
    run = Run(service.policy.request(told), block)
    run.unpack = rebuilt
    await service.launch(run, key)
    return Streamed(run, plain.events(run, service.limits.beat), "text/event-stream", service.limits)


class Streamed(Response):
    """What is said of a run, until it ends or its client leaves, which aborts it."""

    def __init__(self, run: Run, said: AsyncGenerator[bytes], kind: str, limits: ServerLimits) -> None:
        super().__init__()
        self._run = run
        self._said = said
        self._seconds = limits.run_seconds
        self.raw_headers = [(b"content-type", kind.encode()), (b"cache-control", b"no-store")]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        watching = asyncio.ensure_future(self._watch(receive))
        timer = asyncio.get_running_loop().call_later(self._seconds, self._late)
        try:
            with suppress(OSError):  # the client has gone while something was sent
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for message in self._said:
                    await send({"type": "http.response.body", "body": message, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        finally:
            timer.cancel()
            watching.cancel()
            self._leave()
            await self._said.aclose()

    async def _watch(self, receive: Any) -> None:
        """Abort as soon as the client leaves, and not when there is something to send the next time."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._leave()

    def _leave(self) -> None:
        self._run.hear()
        self._run.cancel()

    def _late(self) -> None:
        self._run.fail(TimeoutError(f"a run of more than {self._seconds:g} s, which is what a run may take"))


# -- edits -------------------------------------------------------------------------------------------------------------


async def _install(service: Service, request: Request) -> Response:
    key = _editor(request)
    service.edits.check(key)
    asked, block = await service.received(request, m.EditRequest, key)
    if (block is None) == (asked.ops is None):
        raise Refused(400, "ValueError", "an edit is a block or declared operations")
    edit = _edit(block, asked, service)
    service.once(key, asked.id)
    await service.edits.install(edit, key)
    return Response(msgspec.msgpack.encode(service.edits.info(edit, key)), media_type=CONTENT_TYPE)


def _edit(block: Block | None, asked: m.EditRequest, service: Service) -> Installed:
    if block is not None:
        return Installed(block, asked.name, asked.rowwise)
    assert asked.ops is not None
    return of_operations(edit_ops(heard(asked.ops, service.model), alone=True), asked.name)


async def _clear(service: Service, numbers: list[int] | None, request: Request) -> Response:
    await service.edits.clear(numbers, _editor(request))
    return Response(status_code=204)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise Refused(400, "ValueError", f"{text[:40]!r} is no number of an edit")
    return int(text)


def _editor(request: Request) -> Key:
    key = _key(request)
    if not key.may("edit"):
        raise Refused(403, "PermissionError", f"the key {key.name!r} has not the scope 'edit'")
    return key


# -- answers -----------------------------------------------------------------------------------------------------------


class _Answer:
    response: Response


@contextmanager
def _answered() -> Generator[_Answer]:
    """What is refused, and what a local call would raise, as an answer with a reason."""
    answer = _Answer()
    try:
        yield answer
    except Refused as error:
        answer.response = refusal(error.status, error.kind, error.message)
    except WireError as error:
        answer.response = refusal(400, "ValueError", str(error))
    except (TypeError, ValueError, LookupError, AttributeError, NNsightError) as error:
        kind = msgspec.msgpack.decode(carry(error), type=Failure).kind
        named = kind if any(kind == name for _, name in known()) else "ValueError"
        answer.response = refusal(400, named, str(error))


def refusal(status: int, kind: str, message: str) -> Response:
    """An answer that refuses. The connection is closed: what the client still sends is not read."""
    content = msgspec.json.encode({"error": m.Refusal(kind, message[:4000])})
    return Response(content, status, {"connection": "close"}, "application/json")


def _key(request: Request) -> Key:
    key: Key = request.scope["state"]["key"]
    return key
