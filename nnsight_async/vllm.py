"""The class `VLLM`: arguments in, one engine, a synchronous and an asynchronous surface."""

from __future__ import annotations

import asyncio
import atexit
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, cast
from weakref import WeakSet

from nnsight_async.capture.block import Block
from nnsight_async.capture.function import from_function
from nnsight_async.engine.blueprint import build_manifest
from nnsight_async.engine.engine import Engine, Limits
from nnsight_async.engine.guard import check_main_guard
from nnsight_async.engine.prompts import vllm_prompt
from nnsight_async.engine.sampling import sampling_params
from nnsight_async.engine.settings import engine_settings
from nnsight_async.errors import EngineClosedError, UnsupportedError
from nnsight_async.runs.handle import ProbeRun, settle
from nnsight_async.runs.request import Request
from nnsight_async.runs.run import Run
from nnsight_async.runs.trace import Trace
from nnsight_async.tree.envoy import Envoy
from nnsight_async.tree.model import ModelView

Mode = Literal["sync", "async"]
LATER = ("edits", "serve", "api_key")
MAX_SAVE_BYTES = 1 << 30
BLOCK_TIMEOUT = 60.0


class VLLM(ModelView):
    """A model on a vLLM engine, open to blocks of Python that read and edit its activations.

    Args:
        repo: a repository on the hub, or a folder with a checkpoint.
        mode: "sync" for `with model.trace(...)`, "async" for `async with model.trace(...)`.
        dispatch: build the engine now; otherwise the first trace, `dispatch()` or entering the model does.
        taps: not supported yet.
        rename: other names for modules: `{"model.layers": "layers"}` for one path, `{"self_attn": "attn"}` for every
            module of that name. The old names go on working.
        max_save_bytes: what one run may save, in bytes.
        block_timeout: seconds that a block may run between two locations before its run fails.
        engine_args: everything that vLLM's `AsyncEngineArgs` takes.

    Raises:
        ValueError: an unknown `mode`.
        TypeError: an unknown engine argument; the nearest real one is named.
        EngineStartError: with `dispatch`, when vLLM does not start.
    """

    def __init__(
        self,
        repo: str,
        *,
        mode: Mode = "sync",
        dispatch: bool = False,
        taps: Sequence[str] = (),
        rename: Mapping[str, str] | None = None,
        max_save_bytes: int = MAX_SAVE_BYTES,
        block_timeout: float = BLOCK_TIMEOUT,
        **engine_args: Any,
    ) -> None:
        if mode not in ("sync", "async"):
            raise ValueError(f"mode is 'sync' or 'async', not {mode!r}")
        if taps:
            raise UnsupportedError("taps are not supported yet")
        self.repo = repo
        self.mode: Mode = mode
        self.taps: tuple[str, ...] = ()
        self._engine_args = engine_args
        self._settings = engine_settings(repo, engine_args)
        self._renames = dict(rename or {})
        self._limits = Limits(max_save_bytes, block_timeout)
        self._engine: Engine | None = None
        self._root: Envoy | None = None
        self._closed = False
        self._building = threading.Lock()
        if dispatch:
            check_main_guard()
            self._build()
        elif mode == "sync":  # an async model does not block its caller's loop for what the engine will tell as well
            self._plan()

    @property
    def tree(self) -> Envoy:
        """The root module."""
        return self._root or self._plan()

    def _plan(self) -> Envoy:
        """The tree of a model that has no engine yet."""
        self._root = Envoy(build_manifest(self.repo, self._engine_args).renamed(self._renames))
        return self._root

    # -- life ------------------------------------------------------------------------------------------------------

    @property
    def dispatched(self) -> bool:
        """Whether the engine has been built, and not closed."""
        return self._engine is not None and not self._closed

    @property
    def vllm_entrypoint(self) -> Any:
        """vLLM's `AsyncLLM`, which lives on the engine's own event loop; None before the engine is built."""
        return self._engine.llm if self._engine is not None and not self._closed else None

    def dispatch(self) -> Any:
        """Build the engine if it has not been built; in async mode, `await model.dispatch()`."""
        check_main_guard()
        return asyncio.to_thread(self._build) if self.mode == "async" else self._build()

    def close(self) -> None:
        """End the engine and its processes; closing again does nothing."""
        with self._building:
            self._closed = True
            if self._engine is not None:
                self._engine.close()

    async def aclose(self) -> None:
        """`close`, without blocking the event loop."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        check_main_guard()
        self._build()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        check_main_guard()
        await asyncio.to_thread(self._build)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    # -- runs ------------------------------------------------------------------------------------------------------

    def trace(self, prompt: Any, **sampling: Any) -> Trace:
        """`with model.trace(prompt, ...)`: run a prompt with the body of the `with` as its block.

        `sampling` takes vLLM's sampling parameters (`max_new_tokens` too), `lora_request` and `priority`. Raises
        `TypeError` for an unknown one and `ValueError` for a bad value or an empty prompt.
        """
        return Trace(self, self._request(prompt, sampling, "trace()"), self.mode == "async")

    def run(self, prompt: Any, probe: Callable[[Any, Any], object], **sampling: Any) -> ProbeRun:
        """Run a prompt with the function `probe(model, tracer)` as its block; arguments as for `trace`."""
        return ProbeRun(self, self._request(prompt, sampling, "run()"), from_function(probe))

    def generate(self, prompts: Any, **sampling: Any) -> Any:
        """Run prompts without a block: a list of vLLM's `RequestOutput`s; in async mode, awaitable."""
        several = prompts if _is_several(prompts) else [prompts]
        requests = [self._request(prompt, sampling, "generate()") for prompt in several]
        return self._agenerate(requests) if self.mode == "async" else self._generate(requests)

    def stats(self) -> Any:
        """What runs hold now: a dict of counts, zero when nothing goes on; in async mode, `await model.stats()`.

        `client_runs` and `client_tasks` in this process; `runs`, `waiting`, `entered` and `watched` (blocks, locations
        waited for, modules that report, modules whose operations do) in the worker, where `reports` counts what modules
        have reported since the start. `runner` names the adapter in use. Raises `EngineClosedError` where there is no
        engine.
        """
        if self._engine is None:
            raise EngineClosedError("the engine has not been built yet: call dispatch() first")
        counts = self._engine.counts()
        return asyncio.wrap_future(counts) if self.mode == "async" else counts.result()

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the model, as transformers loads it."""
        from transformers import AutoTokenizer

        given = self._engine_args
        return AutoTokenizer.from_pretrained(
            given.get("tokenizer") or self.repo,
            revision=given.get("tokenizer_revision") or given.get("revision"),
            trust_remote_code=given.get("trust_remote_code", False),
        )

    def launch(self, request: Request, block: Block | None) -> Run:
        """Start a run, building the engine first if need be."""
        check_main_guard() if self._engine is None else None
        return self._submit(request, block)

    async def alaunch(self, request: Request, block: Block | None) -> Run:
        """`launch`, without blocking the event loop while an engine is built."""
        if self._engine is None and not self._closed:
            check_main_guard()
            await asyncio.to_thread(self._build)
        return self._submit(request, block)

    def _submit(self, request: Request, block: Block | None) -> Run:
        engine = self._build()
        run = Run(request, block.names if block is not None else ())
        engine.submit(run, block.payload if block is not None else None)
        return run

    def _generate(self, requests: Sequence[Request]) -> list[Any]:
        runs = [self.launch(request, None) for request in requests]
        return [settle(run).outcome() for run in runs]

    async def _agenerate(self, requests: Sequence[Request]) -> list[Any]:
        runs = [await self.alaunch(request, None) for request in requests]
        try:
            for run in runs:
                await run.changed.until(lambda run=run: run.settled)
        finally:
            for run in runs:
                run.cancel()
        return [run.outcome() for run in runs]

    def _request(self, prompt: Any, options: dict[str, Any], what: str) -> Request:
        for name in LATER:
            if options.pop(name, None) is not None:
                raise UnsupportedError(f"{name}= is not supported yet")
        lora, priority = options.pop("lora_request", None), options.pop("priority", 0)
        return Request(vllm_prompt(prompt, self._chat), sampling_params(options, what=what), lora, priority)

    def _chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    def _build(self) -> Engine:
        if self._engine is not None and not self._closed:
            return self._engine
        with self._building:
            if self._closed:
                raise EngineClosedError("this model was closed; build a new one")
            if self._engine is None:
                engine = Engine(self._settings, self._limits, self._renames)
                engine.start()
                self._engine = engine
                self._root = self._root or Envoy(engine.manifest)
                _open.add(self)
        return self._engine


def _is_several(prompts: Any) -> bool:
    """Whether this is a list of prompts, rather than one prompt that is a list (token ids, a chat)."""
    if not isinstance(prompts, (list, tuple)) or not prompts:
        return False
    first = cast("Any", prompts[0])
    return not isinstance(first, int) and not (isinstance(first, Mapping) and "role" in first)


_open: WeakSet[VLLM] = WeakSet()


@atexit.register
def _close_all() -> None:
    for model in list(_open):
        model.close()
