"""The class `VLLM`: arguments in, one engine, a synchronous and an asynchronous surface."""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
import weakref
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast, overload

from nnsight_async.capture.entered import is_entered
from nnsight_async.capture.function import from_function
from nnsight_async.engine.blueprint import build_manifest
from nnsight_async.engine.engine import CLOSED, Engine, Limits
from nnsight_async.engine.guard import check_main_guard
from nnsight_async.engine.metrics import register
from nnsight_async.engine.prompts import is_several, vllm_prompt
from nnsight_async.engine.repository import check_repository
from nnsight_async.engine.sampling import settings
from nnsight_async.engine.settings import check_names, engine_settings, is_elsewhere, model_name
from nnsight_async.engine.spans import spans_of
from nnsight_async.errors import EngineClosedError
from nnsight_async.runs.aside import aside
from nnsight_async.runs.body import caller, loop_is_running
from nnsight_async.runs.declaring import Declaring
from nnsight_async.runs.edit import of_operations
from nnsight_async.runs.generation import Generation
from nnsight_async.runs.group import planned
from nnsight_async.runs.handle import ProbeRun
from nnsight_async.runs.history import SlowConsumers
from nnsight_async.runs.invokes import ABSENT, InvokeTrace
from nnsight_async.runs.job import Job
from nnsight_async.runs.keywords import over
from nnsight_async.runs.map import Map
from nnsight_async.runs.ops import edit_ops
from nnsight_async.runs.request import Request
from nnsight_async.runs.surface import Mode, Surface
from nnsight_async.runs.trace import Trace
from nnsight_async.runs.window import Window
from nnsight_async.tree.envoy import Envoy
from nnsight_async.tree.layers import check_sites, declared
from nnsight_async.tree.model import ModelView
from nnsight_async.tree.taps import check_taps, resolve

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider
    from prometheus_client import CollectorRegistry

    from nnsight_async.capture.block import Block
    from nnsight_async.interleave.locations import Location
    from nnsight_async.runs.edit import Installed

T = TypeVar("T")
MAX_SAVE_BYTES = 1 << 30
MAX_CONSTANT_BYTES = 1 << 30
MAX_BUFFERED_BYTES = 1 << 30
BLOCK_TIMEOUT = 60.0


class VLLM(Surface, Declaring, ModelView):
    """A model on a vLLM engine, open to blocks of Python that read and edit its activations.

    Args:
        repo: a repository on the hub, or a folder with a checkpoint.
        mode: "sync" for `with model.trace(...)`, "async" for `async with model.trace(...)`.
        dispatch: build the engine now; otherwise the first trace, `dispatch()` or entering the model does.
        taps: where blocks may look, such as `["model.layers[3].mlp.output", "model.layers[*].resid_post"]`. The engine
            then replays CUDA graphs, which stop there; every other place in the forward pass is a `NotATapError`. On
            the CPU, where there are no graphs, it is that alone.
        op_sites: the layers where declared operations (`ops=[...]`) act, such as `["model.layers[*]"]`, on an engine
            that replays CUDA graphs: they are part of what is recorded, and a step with operations alone is a replayed
            one. The engine then replays graphs, unless `enforce_eager=True` is given; an engine that replays none
            applies operations at every layer.
        rename: other names for modules: `{"model.layers": "layers"}` for one path, `{"self_attn": "attn"}` for every
            module of that name. The old names go on working.
        max_save_bytes: what one run may save, in bytes.
        max_buffered_bytes: how many bytes of saved values a run keeps for those who read them step by step, from a
            stream; beyond that the oldest steps are let go of.
        slow_consumers: what becomes of a run if they have not been read by then, though somebody has a stream of it:
            "fail" ends it with `SlowConsumerError`, with "drop" the stream goes on without them (`Token.dropped`).
        max_constant_bytes: how many bytes of large tensors that blocks took along stay in the worker for the next runs.
        block_timeout: seconds that a block may run between two locations before its run fails.
        metrics: have counts in Prometheus' default registry, or in this one.
        spans: have OpenTelemetry spans of the global provider, or of this one; None: if `otlp_traces_endpoint` is set.
        serve: the address of a server (`nnsight-serve`) that all requests go to, and `api_key` a key of it; by default
            the environment's `NNSIGHT_SERVE` and `NNSIGHT_API_KEY`. This process then needs no vLLM.
        engine_args: everything that vLLM's `AsyncEngineArgs` takes.

    Raises:
        ValueError: an unknown `mode`, or unknown `slow_consumers`.
        TypeError: an unknown engine argument; the nearest real one is named.
        EngineStartError: with `dispatch`, when vLLM does not start.
    """

    def __new__(cls, *args: Any, **given: Any) -> Self:
        if cls is VLLM and is_elsewhere(given.get("serve")):
            from nnsight_async.serve.model import ServedVLLM

            return object.__new__(cast("type[Self]", ServedVLLM))
        return object.__new__(cls)

    def __init__(
        self,
        repo: str,
        *,
        mode: Mode = "sync",
        dispatch: bool = False,
        taps: Sequence[str] = (),
        op_sites: Sequence[str] = (),
        rename: Mapping[str, str] | None = None,
        max_save_bytes: int = MAX_SAVE_BYTES,
        max_buffered_bytes: int = MAX_BUFFERED_BYTES,
        slow_consumers: SlowConsumers = "fail",
        max_constant_bytes: int = MAX_CONSTANT_BYTES,
        block_timeout: float = BLOCK_TIMEOUT,
        metrics: bool | CollectorRegistry = False,
        spans: bool | TracerProvider | None = None,
        **engine_args: Any,
    ) -> None:
        if mode not in ("sync", "async"):
            raise ValueError(f"mode is 'sync' or 'async', not {mode!r}")
        if slow_consumers not in ("fail", "drop"):
            raise ValueError(f"slow_consumers is 'fail' or 'drop', not {slow_consumers!r}")
        self._asked = repo, engine_args.get("revision"), engine_args.get("hf_token")
        if dispatch or mode == "sync":  # an async model does not block its caller's loop
            check_repository(*self._asked)
        self.repo = repo
        self.mode: Mode = mode
        check_taps(taps)
        self._asked_taps = tuple(taps)
        self._taps: tuple[Location, ...] = ()
        check_sites(op_sites)
        self._asked_sites = tuple(op_sites)
        self._engine_args = engine_args
        self._renames = dict(rename or {})
        self._settings = engine_settings(
            repo, engine_args, tapped=bool(self._asked_taps), op_sites=self._asked_sites, renames=self._renames
        )
        save_bytes = min(max_save_bytes, sys.maxsize)  # which travels, as a number of 64 bits
        self._limits = Limits(save_bytes, block_timeout, max_buffered_bytes, slow_consumers, max_constant_bytes)
        name = model_name(self._settings)
        self._spans = spans_of(spans, name, engine_args.get("otlp_traces_endpoint"))
        self._engine: Engine | None = None
        self._root: Envoy | None = None
        self._closed = False
        self._servers: dict[tuple[str, str | None], VLLM] = {}
        self._building = threading.Lock()
        register(self, name, metrics)
        if dispatch:
            check_main_guard()
            self._build()
        elif mode == "sync":  # the engine of an async model will tell as well
            self._plan()

    @property
    def tree(self) -> Envoy:
        """The root module."""
        return self._root or self._plan()

    def _plan(self) -> Envoy:
        """The tree of a model that has no engine yet."""
        manifest = build_manifest(self.repo, self._engine_args).renamed(self._renames)
        self._taps = resolve(self._asked_taps, manifest)
        declared(self._asked_sites, manifest)
        self._root = Envoy(manifest)
        return self._root

    @property
    def taps(self) -> tuple[str, ...]:
        """Where blocks may look, as they would write it; nothing if that is everywhere."""
        if self._asked_taps and not self._taps:
            self._plan()
        return tuple(map(str, self._taps))

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
        return self._build_aside() if self.mode == "async" else self._build()

    def close(self) -> None:
        """End the engine and its processes; closing again does nothing."""
        with self._building:
            self._closed = True
            for each in (self._engine, *self._servers.values()):
                if each is not None:
                    each.close()

    def __enter__(self) -> Self:
        check_main_guard()
        self._build()
        return self

    async def __aenter__(self) -> Self:
        check_main_guard()
        await self._build_aside()
        return self

    # -- runs ------------------------------------------------------------------------------------------------------

    @overload
    def trace(self, prompt: Any, /, **sampling: Any) -> Trace: ...
    @overload
    def trace(self, **sampling: Any) -> InvokeTrace: ...
    def trace(self, prompt: Any = ABSENT, **sampling: Any) -> Trace | InvokeTrace:
        """`with model.trace(prompt, ...)`: run a prompt with the body of the `with` as its block.

        Without a prompt the body runs as it stands, and each `with tracer.invoke(prompt, ...):` in it is one request.
        `sampling` takes vLLM's sampling parameters (`max_new_tokens` too), `lora_request` and `priority`. Raises
        `TypeError` for an unknown one and `ValueError` for a bad value or an empty prompt.
        """
        return self._on(sampling)._trace(prompt, sampling, "trace()")

    def run(self, prompt: Any, probe: Callable[[Any, Any], object], **sampling: Any) -> ProbeRun:
        """Run a prompt with the function `probe(model, tracer)` as its block; arguments as for `trace`."""
        on = self._on(sampling)
        return ProbeRun(on, on._request(prompt, sampling, "run()"), on._probed(probe))

    def map(
        self,
        prompts: Iterable[Any] | AsyncIterable[Any],
        probe: Callable[[Any, Any], object],
        *,
        concurrency: int = 64,
        ordered: bool = False,
        progress: bool = True,
        return_errors: bool = False,
        **sampling: Any,
    ) -> Map:
        """Run each of many prompts with the function `probe(model, tracer)` as its block.

        Iterate over it (`async for` in async mode) for a `MapResult` per prompt, as they end or, with `ordered`, in the
        order of the prompts. At most `concurrency` runs go at a time, and prompts are taken as there is room.
        `progress` shows a bar, if this is a terminal. The error of a prompt ends the iteration, unless
        `return_errors` has it come as a result.
        """
        on = self._on(sampling)
        asked, block = on._settings_of(sampling, "map()"), on._probed(probe)
        return Map(
            on,
            prompts,
            lambda prompt: planned(asked.on(vllm_prompt(prompt, self._chat)), block),
            Window(concurrency, ordered=ordered),
            asynchronous=self.mode == "async",
            progress=progress,
            return_errors=return_errors,
        )

    def generate(self, prompts: Any = ABSENT, **sampling: Any) -> Any:
        """Run prompts without a block: a list of vLLM's `RequestOutput`s; in async mode, awaitable.

        `with model.generate(prompt, ...) as tracer:` is `with model.trace(prompt, ...) as tracer:`.
        """
        entered, on = is_entered(caller()), self._on(sampling)
        if prompts is ABSENT and self.mode == "sync" and not entered:
            raise ValueError("generate() needs prompts, unless it stands in a `with`")
        if prompts is ABSENT or (entered and self.mode == "sync"):
            return on._trace(prompts, sampling, "generate()")
        asked = on._settings_of(sampling, "generate()")
        several = prompts if is_several(prompts) else [prompts]
        requests = [asked.on(vllm_prompt(prompt, self._chat)) for prompt in several]
        generation = Generation(on, requests, self.mode == "async")
        return generation if self.mode == "async" else generation.result()

    # -- edits -----------------------------------------------------------------------------------------------------

    def edit(
        self,
        probe: Callable[[Any, Any], object] | str | None = None,
        *,
        name: str | None = None,
        rowwise: bool = False,
        ops: Any = None,
        **where: Any,
    ) -> Any:
        """`with model.edit(name) as (tracer, edit):`: install a block that every request of the engine runs.

        It runs on all requests that are submitted from the end of the `with` on, whoever sends them, before their own
        block, and after the edits that were installed before it; `edits=[names]` of a request chooses among those with
        a name. What it saves comes with each request, as `output.saves`; what it raises ends that request alone.

        Args:
            probe: the name, or, instead of the `with`, a function `probe(model, tracer)` as the block. Then this
                returns the `Edit`; on a model of mode "async", `await model.edit(probe)`.
            name: the name by which requests choose the edit.
            rowwise: whether what the block does to each row depends on that row alone. Requests that run nothing but
                such edits share cached prefixes, if the engine caches any; a block that is not so must see its whole
                prompt.
            ops: instead of a block, declared operations that change the stream; this returns the `Edit` then, too.
                They act before those of the request. Without `positions` they are `rowwise`.
            where: `serve=` and `api_key=`, as for `trace`.

        Raises:
            ValueError: an edit of that name is installed.
        """
        on = self._on(where)
        check_names(where, ("serve", "api_key"), "edit()")
        if isinstance(probe, str):
            probe, name = None, probe
        if ops is not None:
            return on._put(of_operations(edit_ops(ops, alone=probe is None), name))
        return on._edit(None if probe is None else on._probed(probe), name, rowwise=rowwise)

    def install(self, edit: Installed) -> None:
        """Install an edit, building the engine first if need be."""
        self._do(lambda engine: engine.edits.install(edit))

    async def ainstall(self, edit: Installed) -> None:
        """`install`, without blocking the event loop."""
        await self._ado(lambda engine: engine.edits.install(edit))

    def _installed(self) -> Sequence[Installed]:
        return self._engine.edits.installed if self._engine is not None and not self._closed else ()

    def _clear(self, numbers: list[int] | None) -> Future[None] | None:
        if self._engine is None or self._closed:
            return None
        return self._engine.call(self._engine.edits.clear(numbers))

    # -- adapters --------------------------------------------------------------------------------------------------

    def add_lora(self, lora_request: Any) -> Any:
        """Load a LoRA adapter ahead of the requests that name it; in async mode, `await model.add_lora(...)`.

        `lora_request` is vLLM's `LoRARequest`. Raises `AdapterError` for an adapter that cannot be loaded, for a name
        or a number that another one has, and where the engine takes none (`enable_lora=True`).
        """
        return self._complete(lambda engine: engine.adapters.add(lora_request))

    def remove_lora(self, number: int) -> Any:
        """Unload the adapter of that number; False if it was not loaded. In async mode, to be awaited.

        Raises `AdapterError` while requests use it.
        """
        return self._complete(lambda engine: engine.adapters.remove(number))

    def list_loras(self) -> Any:
        """The numbers of the adapters that are loaded, as a set; in async mode, to be awaited."""
        return self._complete(lambda engine: engine.adapters.loaded())

    # -- what the engine does --------------------------------------------------------------------------------------

    def stats(self) -> Any:
        """Counts of what runs hold now, and of what there was since the start; in async mode, `await model.stats()`.

        A dict, each name of which the reference explains. Raises `EngineClosedError` where there is no engine, and
        `EngineDeadError` where there is none any more.
        """
        if self._engine is None:
            raise EngineClosedError("the engine has not been built yet: call dispatch() first")
        counts = self._engine.counts()
        return asyncio.wrap_future(counts) if self.mode == "async" else counts.result()

    def reading(self) -> dict[str, Any] | None:
        """What metrics show: `stats()` and `up`, without waiting long for the worker; None once this is closed."""
        if self._closed:
            return None
        return {"up": 0} if self._engine is None else self._engine.reading()

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

    def owners(self) -> tuple[object, ...]:
        """What the modules belong to that blocks on this model may use."""
        return (self,) if self._root is None else (self, self._root.__block_owner__)

    def launch(self, job: Job) -> None:
        """Start a run or a group of them, building the engine first if need be."""
        check_main_guard() if self._engine is None else None
        self._submit(job)

    async def alaunch(self, job: Job) -> None:
        """`launch`, without blocking the event loop while an engine is built."""
        if self._engine is None and not self._closed:
            check_main_guard()
            await self._build_aside()
        self._submit(job)

    def _submit(self, job: Job) -> None:
        engine = self._build()
        try:
            for run in job.runs():
                if self._spans is not None:
                    self._spans.begin(run)
                engine.submit(run)
        except BaseException:
            job.cancel()
            raise

    def _trace(self, prompt: Any, sampling: Mapping[str, Any], what: str) -> Trace | InvokeTrace:
        asynchronous = self.mode == "async"
        if prompt is not ABSENT:
            return Trace(self, self._request(prompt, sampling, what), asynchronous)
        self._settings_of(sampling, what)  # an error belongs here, and not to the first invoke
        return InvokeTrace(
            self, lambda prompt, own: self._request(prompt, over(sampling, own, "invoke()"), "invoke()"), asynchronous
        )

    def _request(self, prompt: Any, options: Mapping[str, Any], what: str) -> Request:
        request = self._settings_of(options, what)
        request.prompt = vllm_prompt(prompt, self._chat)
        return request

    def _settings_of(self, options: Mapping[str, Any], what: str) -> Request:
        return settings(options, what)

    def _probed(self, probe: Callable[[Any, Any], object]) -> Block:
        return from_function(probe, self.owners())

    def _on(self, options: dict[str, Any]) -> VLLM:
        """Where a run goes, taken out of its `options`: this model, or it on the server that `serve=` names."""
        url, key = options.pop("serve", None), options.pop("api_key", None)
        if url is None and key is not None:
            raise TypeError("api_key= is for the server that serve= names")
        if url is None:
            return self
        if (url, key) not in self._servers:
            from nnsight_async.serve.model import ServedVLLM

            self._servers[url, key] = ServedVLLM(self.repo, mode=self.mode, serve=url, api_key=key, original=self)
        return self._servers[url, key]

    def _chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    def _complete(self, work: Callable[[Engine], Coroutine[Any, Any, T]]) -> Any:
        """The result of what the engine does; on a model of mode "async", to be awaited where an event loop runs."""
        return self._ado(work) if self.mode == "async" and loop_is_running() else self._do(work)

    def _do(self, work: Callable[[Engine], Coroutine[Any, Any, T]]) -> T:
        check_main_guard() if self._engine is None else None
        engine = self._build()
        return engine.call(work(engine)).result()

    async def _ado(self, work: Callable[[Engine], Coroutine[Any, Any, T]]) -> T:
        if self._engine is None and not self._closed:
            check_main_guard()
            await self._build_aside()
        engine = self._build()
        return await asyncio.wrap_future(engine.call(work(engine)))

    def _build(self) -> Engine:
        if self._engine is None or self._closed:
            with self._building:
                if self._closed:
                    raise EngineClosedError(CLOSED)
                if self._engine is None:
                    check_repository(*self._asked)
                    engine = Engine(self._settings, self._limits, self._renames, self._asked_taps, self._asked_sites)
                    starting = weakref.finalize(self, _end, engine)
                    engine.start()
                    starting.detach()
                    # Made after vLLM's own, and so called before them when the interpreter exits.
                    weakref.finalize(self, _end, engine)
                    self._engine = engine
                    self._root, self._taps = self._root or Envoy(engine.manifest), engine.taps
        self._engine.check()
        return self._engine

    async def _build_aside(self) -> None:
        await aside(self._build, "nnsight-build")


def _end(engine: Engine) -> None:
    """Close the engine of a model that nobody holds any more, or that is open when the interpreter exits."""
    if engine.in_its_thread:
        threading.Thread(target=engine.close, name="nnsight-close", daemon=True).start()
    else:
        engine.close()
