"""A server: one engine, and one HTTP application on the engine's own loop."""

from __future__ import annotations

import asyncio
import socket
import threading
from argparse import Namespace
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from nnsight_async.serve import frontend
from nnsight_async.serve.access import LOOPBACK, Gate, Keys
from nnsight_async.serve.app import Service, router
from nnsight_async.serve.page import page
from nnsight_async.serve.policy import Policy, ServerLimits

if TYPE_CHECKING:
    from nnsight_async.engine.engine import Engine
    from nnsight_async.vllm import VLLM

MOST_CONNECTIONS = 4096
LONGEST_HEAD = 1 << 16
"""Bytes of the head of a request."""
CLOSING = 5.0
"""Seconds that connections have to end when the server does."""


class Server:
    """Serves a model that is there, from `start` to `close`; `with Server(model) as server: server.url`.

    Everything runs on the engine's loop, for vLLM's application needs its engine there. Without keys, requests are
    taken under the names of this machine alone.

    Args:
        model: a model of mode "async", with its engine built.
        keys: who may use it; none: whoever can reach it, for everything.
        allow_python: whether blocks of Python are run, for keys with that scope.
        limits: what one client may take.
        args: vLLM's options, as its parser gives them.
        tls: uvicorn's options for TLS.
    """

    def __init__(
        self,
        model: VLLM,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        keys: Keys | None = None,
        allow_python: bool = False,
        limits: ServerLimits | None = None,
        args: Namespace | None = None,
        tls: dict[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.keys = keys or Keys([])
        self._allow_python = allow_python
        self._limits = limits or ServerLimits()
        self._engine: Engine = engine_of(model)
        self._args = args or frontend.plain_args(model.repo, {})
        self._tls = tls or {}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, port), family=family)
        self._host = host
        self._serving: Future[None] | None = None
        self.service: Service

    @property
    def url(self) -> str:
        """Where it is."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{'https' if self._tls else 'http'}://{host}:{self._listening.getsockname()[1]}"

    def start(self) -> Self:
        """Begin to serve; returns when requests are taken."""
        self._server: Any = self._engine.call(self._build()).result()
        self._serving = self._engine.call(self._server.serve(sockets=[self._listening]))
        started = threading.Event()
        self._serving.add_done_callback(lambda _: started.set())
        while not self._server.started and not started.wait(0.01):
            pass
        if started.is_set():
            self._serving.result()
        return self

    def stop(self) -> None:
        """Have it end, from a signal handler or any thread; a second time, without waiting for connections."""
        self._server.force_exit = self._server.should_exit
        self._server.should_exit = True

    def wait(self) -> None:
        """Wait for the end."""
        if self._serving is not None:
            self._serving.result()

    def close(self) -> None:
        """End it, and the runs on it. The model stays."""
        if self._serving is not None and not self._serving.done():
            self.stop()
            self.wait()
        self._listening.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def _build(self) -> uvicorn.Server:
        app = await frontend.application(self._engine.llm, self._args)
        policy = Policy(
            self._engine.manifest,
            self._allow_python,
            frontend.adapters(app),
            self._engine.llm.model_config.max_model_len,
            self._limits.room,
        )
        self.service = Service(self.model, self._engine, policy, self._limits)
        app.include_router(router(self.service))
        app.include_router(page())
        names = LOOPBACK if self._host in LOOPBACK else None
        server = uvicorn.Server(
            uvicorn.Config(
                Gate(app, self.keys, names, self.service.uploads, self._limits.body),
                log_level="warning",
                http=patient(self._limits.head_seconds),
                ws="none",
                limit_concurrency=MOST_CONNECTIONS,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=int(CLOSING),
                server_header=False,
                **self._tls,
            )
        )
        app.state.server = server  # which vLLM's routes end when its engine has ended
        self._engine.when_dead(lambda: setattr(server, "should_exit", True))  # and ours may be all that is asked
        return server


def engine_of(model: VLLM) -> Engine:
    """The engine of a model, built."""
    return model._build()  # pyright: ignore[reportPrivateUsage]  # the two are one package


def patient(seconds: float) -> type[asyncio.Protocol]:
    """The protocol that waits so long."""
    return type("Patient", (Patient,), {"_seconds": seconds})


_Uvicorn: Any = AutoHTTPProtocol


class Patient(_Uvicorn):
    """uvicorn's protocol, which closes a connection whose head is too long, or that owes a head, or a body that nobody
    reads, for so many seconds.

    uvicorn itself waits for a head, and for a body that nobody reads, as long as it takes, and keeps as much of a head,
    or of the headers after a body, as there is (0.54, httptools). The time of a body that is read is its reader's.
    """

    _seconds: float
    _unread = 0
    """Bytes since the last that were of a body, or ended a head or a request."""
    _whole = True
    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unread += len(data)
        super().data_received(data)
        if not hasattr(AutoHTTPProtocol, "on_message_begin"):  # h11, which bounds a head itself
            self._unread = 0
            if self.cycle is not None:
                self._came()
        if self._unread > LONGEST_HEAD:
            self.transport.close()

    def on_message_begin(self) -> None:
        self._whole = False
        self._wait()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._came()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._whole = True
        self._came()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._whole:
            self._wait()

    def _wait(self) -> None:
        self._came()
        self._patience = asyncio.get_running_loop().call_later(self._seconds, self.transport.close)

    def _came(self) -> None:
        self._unread = 0
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
