"""`VLLM` on a server: the same class and the same surface, without vLLM and without a GPU in this process."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Self, cast

from nnsight_async.errors import EngineClosedError, ServerError
from nnsight_async.runs.body import loop_is_running
from nnsight_async.serve.block import of_probe, of_text
from nnsight_async.serve.params import request_of
from nnsight_async.serve.remote import CLOSED, Remote
from nnsight_async.tree.envoy import Envoy
from nnsight_async.vllm import MAX_BUFFERED_BYTES, VLLM

if TYPE_CHECKING:
    from nnsight_async.capture.block import Block
    from nnsight_async.capture.body import BodyCapture
    from nnsight_async.engine.engine import Engine
    from nnsight_async.runs.history import SlowConsumers
    from nnsight_async.runs.request import Request
    from nnsight_async.runs.surface import Mode

TOKENIZER = frozenset(("tokenizer", "revision", "tokenizer_revision", "trust_remote_code"))

NOWHERE = (
    "this model has no server to run on, and vLLM is not installed here: give serve='http://HOST:PORT', or set "
    "NNSIGHT_SERVE"
)


class ServedVLLM(VLLM):
    """What `VLLM(repo, serve=url)` is, and `VLLM(repo)` where `NNSIGHT_SERVE` is set or vLLM is not installed."""

    def __init__(
        self,
        repo: str,
        *,
        mode: Mode = "sync",
        dispatch: bool = False,
        rename: Mapping[str, str] | None = None,
        max_buffered_bytes: int = MAX_BUFFERED_BYTES,
        slow_consumers: SlowConsumers = "fail",
        serve: str | None = None,
        api_key: str | None = None,
        original: VLLM | None = None,
        **engine_args: Any,
    ) -> None:
        serve, api_key = serve or os.environ.get("NNSIGHT_SERVE"), api_key or os.environ.get("NNSIGHT_API_KEY")
        if mode not in ("sync", "async"):
            raise ValueError(f"mode is 'sync' or 'async', not {mode!r}")
        if others := sorted(engine_args.keys() - TOKENIZER):
            raise TypeError(f"VLLM() on a server got {others[0]!r}: how its engine runs is set where it is started")
        self.repo = repo
        self.mode = mode
        self._asked_taps, self._taps = (), ()
        self._engine_args = engine_args
        self._renames = dict(rename or {})
        self._spans = None
        self._root: Envoy | None = None
        self._closed = False
        self._building = threading.Lock()
        self._servers: dict[tuple[str, str | None], VLLM] = {}
        self._original = original
        remote = None
        if serve is not None:
            remote = Remote(serve, api_key, repo, self._renames, (max_buffered_bytes, slow_consumers))
            weakref.finalize(self, remote.close)
        self._engine = cast("Engine | None", remote)  # which is all of an engine that a model uses
        if dispatch:
            self._described().result()

    def dispatch(self) -> Any:
        """Ask the server for its model; in async mode, `await model.dispatch()`."""
        done = self._described()
        if self.mode == "async" and loop_is_running():
            return _awaited(done)
        return done.result()

    @property
    def taps(self) -> tuple[str, ...]:
        """Where blocks may look on the server, as they would write it; nothing if that is everywhere."""
        return () if self._engine is None else self._remote.taps

    def take(self, capture: BodyCapture, *tracers: object) -> Block:
        owners = [*self._known(), *tracers]
        return of_text(capture.text(), lambda: capture.block(owners), owners)

    def owners(self) -> tuple[object, ...]:
        original = () if self._original is None else self._original.owners()
        return (*super().owners(), *original)

    def __enter__(self) -> Self:
        self._described().result()
        return self

    async def __aenter__(self) -> Self:
        await asyncio.wrap_future(self._described())
        return self

    def _probed(self, probe: Callable[[Any, Any], object]) -> Block:
        return of_probe(probe, self._known(), self)

    def _known(self) -> tuple[object, ...]:
        """The owners of modules, with the tree that their paths are looked up in."""
        _ = self.tree
        return self.owners()

    def _settings_of(self, options: Mapping[str, Any], what: str) -> Request:
        return request_of(options, what)

    def _plan(self) -> Envoy:
        served = next(iter(self._servers.values()), None) if self._engine is None else None
        self._root = Envoy(self._remote.manifest) if served is None else served.tree
        return self._root

    def _build(self) -> Engine:
        if self._closed:
            raise EngineClosedError(CLOSED)
        return cast("Engine", self._remote)

    def _described(self) -> Future[Any]:
        remote = self._remote
        return remote.call(remote.describe())

    @property
    def _remote(self) -> Remote:
        if self._engine is None:
            raise ServerError(NOWHERE)
        return cast("Remote", self._engine)

    @property
    def held(self) -> int:
        """Runs of this client that go on now."""
        return self._remote.held


async def _awaited(future: Future[Any]) -> None:
    await asyncio.wrap_future(future)
