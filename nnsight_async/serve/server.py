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
        )
        self.service = Service(self.model, self._engine, policy, self._limits)
        app.include_router(router(self.service))
        app.include_router(page())
        names = LOOPBACK if self._host in LOOPBACK else None
        return uvicorn.Server(
            uvicorn.Config(
                Gate(app, self.keys, names),
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


def engine_of(model: VLLM) -> Engine:
    """The engine of a model, built."""
    return model._build()  # pyright: ignore[reportPrivateUsage]  # the two are one package


def patient(seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's protocol, which closes a connection whose request has not begun within `seconds`.

    uvicorn itself waits for the head of a first request as long as it takes (0.54).
    """

    class Patient(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._patience = asyncio.get_running_loop().call_later(seconds, self._look, transport)

        def connection_lost(self, exc: Exception | None) -> None:
            self._patience.cancel()
            super().connection_lost(exc)

        def _look(self, transport: Any) -> None:
            protocol: Any = self
            if protocol.cycle is None:  # no request has been made on this connection
                transport.close()

    return Patient
