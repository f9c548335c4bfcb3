"""A server, as what a model of this process runs on: what `engine/engine.py` is for an engine of its own."""

from __future__ import annotations

import asyncio
import functools
import secrets
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

import httpx
import msgspec
import uvloop

from nnsight_async.capture.block import Block
from nnsight_async.errors import EngineClosedError, ServerError, UnsupportedError
from nnsight_async.runs.carried import rebuilt
from nnsight_async.runs.edit import Installed
from nnsight_async.runs.frames import Frame
from nnsight_async.runs.history import Buffer, SlowConsumers
from nnsight_async.serve import messages as m
from nnsight_async.serve import wire
from nnsight_async.serve.block import ServedBlock
from nnsight_async.serve.ops import said
from nnsight_async.serve.outputs import of_delta
from nnsight_async.serve.params import Params
from nnsight_async.serve.program import PLACE
from nnsight_async.serve.refusals import refusal_of, start_of
from nnsight_async.serve.remote_edits import RemoteEdits
from nnsight_async.serve.turns import Turns
from nnsight_async.tree.manifest import Manifest

if TYPE_CHECKING:
    from nnsight_async.runs.run import Run

T = TypeVar("T")

SILENCE = 90.0
"""Seconds without a sign of life after which a server counts as gone; it gives one every 15."""
CONNECTING = 15.0
PATIENCE = 5.0

CLOSED = "this model was closed; build a new one"


class Remote:
    """Requests to one server, from an event loop in a thread of its own, which any number of callers share."""

    llm = None

    def __init__(
        self, url: str, api_key: str | None, repo: str, renames: Mapping[str, str], buffered: tuple[int, SlowConsumers]
    ) -> None:
        self.url = _checked(url)
        self._repo = repo
        self._renames = renames
        self._buffered = buffered
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="nnsight-client", daemon=True)
        self._runs: dict[int, Run] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._lock = threading.Lock()
        self._client: httpx.AsyncClient | None = None
        self._description: asyncio.Task[m.Description] | None = None
        self._described: m.Description | None = None
        self._turns: Turns | None = None
        self.edits = RemoteEdits(self)
        self._thread.start()

    # -- from any thread -------------------------------------------------------------------------------------------

    def call(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on this loop."""
        if self._closing:
            work.close()
            raise EngineClosedError(CLOSED)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def submit(self, run: Run) -> None:
        """Start a run; returns at once."""
        run.model = self._repo
        run.ride(())
        filename = run.block.filename if run.block is not None else PLACE
        run.unpack = functools.partial(rebuilt, renamed=lambda name: filename if name == PLACE else name)
        run.buffer = Buffer(*self._buffered)
        with self._lock:
            if self._closing:
                raise EngineClosedError(CLOSED)
            self._loop.call_soon_threadsafe(self._launch, run)

    @functools.cached_property
    def manifest(self) -> Manifest:
        """The module tree; asked of the server the first time, which is waited for."""
        manifest = Manifest.decode(self._description_of().manifest)
        theirs = {path: alias for alias, path in manifest.renames.items()}
        return manifest.renamed({**theirs, **self._renames})

    @property
    def taps(self) -> tuple[str, ...]:
        """Where blocks may look there; asked as the tree is."""
        return tuple(self._description_of().taps)

    def check(self) -> None:
        """A server that is gone is told of by the next request."""

    def counts(self) -> Future[dict[str, Any]]:
        """What the server's engine holds; the scope `admin` is asked for."""
        return self.call(self._counts())

    def reading(self) -> dict[str, Any]:
        return {"up": 1, "client_runs": len(self._runs), "client_tasks": len(self._tasks)}

    @property
    def held(self) -> int:
        """Runs that go on now, of this client."""
        return len(self._runs) + len(self._tasks)

    @property
    def in_its_thread(self) -> bool:
        return threading.current_thread() is self._thread

    @property
    def adapters(self) -> Any:
        raise UnsupportedError(
            "adapters are loaded where the server is started: --enable-lora --lora-modules NAME=PATH"
        )

    def close(self) -> None:
        """End the connections; runs that still go are aborted."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        with suppress(RuntimeError, TimeoutError):
            asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result(2 * PATIENCE)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        if not self._thread.is_alive():
            self._loop.close()

    def _description_of(self) -> m.Description:
        return self._described or self.call(self.describe()).result()

    # -- on the loop -----------------------------------------------------------------------------------------------

    async def describe(self) -> m.Description:
        """What the server says of itself, asked once; `ServerError` where it has another model."""
        if self._description is None or (self._description.done() and self._description.exception() is not None):
            self._description = self._loop.create_task(self._describe())
        return await asyncio.shield(self._description)

    async def request(self, method: str, path: str, content: bytes | None = None) -> bytes:
        """The body of an answer; raises what it refuses with."""
        try:
            answer = await self.client.request(method, f"/nnsight/v1{path}", content=content, headers=_typed(content))
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if answer.is_success:
            return answer.content
        raise refusal_of(answer.status_code, answer.content)

    @property
    def client(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = httpx.AsyncClient(
                base_url=self.url,
                headers=self._headers,
                timeout=httpx.Timeout(SILENCE, connect=CONNECTING),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            )
        return self._client

    async def _describe(self) -> m.Description:
        content = await self.request("GET", "/model")
        try:
            description = msgspec.msgpack.decode(content, type=m.Description)
        except msgspec.MsgspecError as error:
            raise ServerError(f"{self.url} is no server of nnsight_async: {error}") from None
        if description.model != self._repo:
            raise ServerError(f"{self.url} serves {description.model!r}, and this model is {self._repo!r}")
        self._described = description
        return description

    async def _counts(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.json.decode(await self.request("GET", "/stats"))
        return found

    def _launch(self, run: Run) -> None:
        if run.settled:
            return
        self._runs[run.key] = run
        task = self._loop.create_task(self._serve(run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, run: Run) -> None:
        over = asyncio.Event()
        run.when_settled(lambda: self._from_outside(over.set))
        reading, settled = self._loop.create_task(self._read(run)), self._loop.create_task(over.wait())
        try:
            await asyncio.wait({reading, settled}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reading, settled):
                task.cancel()  # which closes the connection, and so aborts the run where it is
            await asyncio.wait({reading, settled})
            self._runs.pop(run.key, None)
            if not run.settled:
                run.fail(ServerError(f"{self.url} ended its answer before the run had ended"))
            run.unload()

    async def _read(self, run: Run) -> None:
        try:
            body = await self._body(run)
            async with (await self._room()).turn(len(body)):
                await self._asked(run, body)
        except httpx.HTTPError as error:
            run.fail(self._unreachable(error))
        except wire.WireError as error:
            run.fail(ServerError(f"{self.url} sent what is no answer: {error}"))
        except Exception as error:
            run.fail(error)

    async def _room(self) -> Turns:
        if self._turns is None:
            described = await self.describe()
            self._turns = self._turns or Turns(described.runs, described.uploads)
        return self._turns

    async def _asked(self, run: Run, body: bytes) -> None:
        try:
            await self._stream(run, body)
        except (httpx.ConnectError, httpx.RemoteProtocolError) as error:
            if run.output is not None or run.ledger.through >= 0:
                raise
            with suppress(httpx.HTTPError):  # a kept connection that the server had closed; the run is the same
                await self._stream(run, body)
                return
            raise error

    async def _body(self, run: Run) -> bytes:
        request, block = run.request, run.block
        code, tensors = None, []
        if block is not None:
            assert isinstance(block, ServedBlock)
            code, tensors = block.code(await self.describe())
        params, prompt = request.params, request.prompt
        assert isinstance(params, Params)
        asked = m.RunRequest(
            id=secrets.token_hex(16),
            prompt=_prompt(prompt),
            sampling=params.sampling(),
            edits=None if request.edits is None else list(request.edits),
            priority=request.priority,
            lora=request.lora,
            cache_salt=prompt.get("cache_salt"),
            names=list(run.names),
            block=code,
            ops=said(request.ops),
        )
        return wire.encode(asked, tensors)

    async def _stream(self, run: Run, body: bytes) -> None:
        async with self._answer("/nnsight/v1/runs", body) as answer:
            if answer.status_code != 200:
                run.fail(refusal_of(answer.status_code, await start_of(answer)))
                return
            # Not `aiter_raw`, which closes the answer at its end.
            chunks = cast("httpx.AsyncByteStream", answer.stream)
            async with aclosing(wire.messages(aiter(chunks), m.replies, m.REPLY_BOUNDS)) as found:
                async for received in found:
                    _feed(run, received)
                    if run.settled or isinstance(received.body, m.Ended):
                        return

    @asynccontextmanager
    async def _answer(self, path: str, body: bytes) -> AsyncGenerator[httpx.Response]:
        """An answer on its way, which is closed by a task of its own: a run that settles cancels who reads it, and a
        closing that is cancelled leaves a connection open, behind which the server goes on."""
        asked = self.client.build_request("POST", path, content=body, headers=_typed(body))
        answer = await self.client.send(asked, stream=True)
        try:
            yield answer
        finally:
            closing = self._loop.create_task(answer.aclose())
            self._tasks.add(closing)
            closing.add_done_callback(self._closed)
            await asyncio.wait({closing})

    def _closed(self, closing: asyncio.Task[None]) -> None:
        """Whatever it raised: the run has ended, and its connection with it."""
        self._tasks.discard(closing)
        if not closing.cancelled():
            closing.exception()

    def _unreachable(self, error: httpx.HTTPError) -> ServerError:
        return ServerError(f"{self.url} cannot be reached, or has gone: {str(error) or type(error).__name__}")

    def _from_outside(self, function: Callable[[], object]) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    async def _shut_down(self) -> None:
        for run in list(self._runs.values()):
            run.fail(EngineClosedError("the model was closed while this run was going"))
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=PATIENCE)
        if self._client is not None:
            await self._client.aclose()


def _feed(run: Run, received: wire.Received[m.Reply]) -> None:
    body, buffers = received.body, received.buffers
    match body:
        case m.Begun():
            edits = [Installed(Block(b"", (), part.filename, part.line, ""), part.name, False) for part in body.parts]
            run.ride(edits, operated=body.operated)
        case m.Delta():
            run.feed_output(of_delta(body))
        case m.Saved():
            entries = [(name, operation, buffers.unpack(value)) for name, operation, value in body.entries]
            run.feed_frame(
                Frame(
                    run.key, body.step, entries, body.done, body.stopped, body.ended, body.error, body.printed,
                    body.warned, body.size, _part(run, body.part), body.number,
                )
            )  # fmt: skip
        case m.Failed():
            run.fail(rebuilt(body.error))
        case _:
            pass
    buffers.finish()


def _part(run: Run, part: int) -> int:
    if not 0 <= part < len(run.ledger.frames):
        raise wire.WireError("a malformed message: values of a block that the run has not")
    return part


def _prompt(prompt: Mapping[str, Any]) -> str | list[int]:
    more = sorted(prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"})
    if more:
        raise UnsupportedError(f"a served model takes text and token ids as prompts, and not {', '.join(more)}")
    ids = prompt.get("prompt_token_ids")
    return prompt["prompt"] if ids is None else ids


def _checked(url: str) -> str:
    parts = httpx.URL(url)
    if parts.scheme not in ("http", "https") or not parts.host:
        raise ValueError(f"serve={url!r}: the address of a server is expected, such as 'http://127.0.0.1:6677'")
    return str(parts).rstrip("/")


def _typed(content: bytes | None) -> dict[str, str]:
    return {} if content is None else {"content-type": wire.CONTENT_TYPE}
