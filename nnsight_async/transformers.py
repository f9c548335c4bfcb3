"""The class `TransformersModel`: the same blocks on a model of transformers in this process, with gradients."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from nnsight_async.capture.entered import is_entered
from nnsight_async.capture.function import from_function
from nnsight_async.engine.prompts import is_several
from nnsight_async.errors import EngineClosedError
from nnsight_async.local.arguments import check_arguments
from nnsight_async.local.engine import LocalEngine, RunLimits
from nnsight_async.local.held import Held
from nnsight_async.local.invokes import LocalInvokeTrace
from nnsight_async.local.prompts import given_prompt
from nnsight_async.local.sampling import generation_defaults, settings
from nnsight_async.local.scan import Scanner
from nnsight_async.runs.body import caller
from nnsight_async.runs.generation import Generation
from nnsight_async.runs.group import planned
from nnsight_async.runs.handle import ProbeRun
from nnsight_async.runs.invokes import ABSENT
from nnsight_async.runs.keywords import over
from nnsight_async.runs.map import Map
from nnsight_async.runs.session import Session, in_session
from nnsight_async.runs.surface import Mode, Surface
from nnsight_async.runs.trace import Trace
from nnsight_async.runs.window import Window
from nnsight_async.tree.envoy import Envoy
from nnsight_async.tree.model import ModelView

if TYPE_CHECKING:
    from nnsight_async.runs.edit import Installed
    from nnsight_async.runs.history import SlowConsumers
    from nnsight_async.runs.job import Job
    from nnsight_async.runs.request import Request

T = TypeVar("T")
GENERATED = 20
"""How many tokens `generate` draws if nobody says, as in transformers."""
BLOCK_TIMEOUT = 600.0


class TransformersModel(Surface, ModelView):
    """A model of transformers in this process, open to blocks of Python that read and edit its activations.

    `trace` is one forward pass and `generate` many. Values are flat, `[tokens, width]`, as on vLLM. Weights are frozen;
    where a block takes gradients, everything that it reads has a `.grad` after `loss.backward()`.

    Args:
        repo: a repository on the hub, a folder with a checkpoint, or a model that has been loaded.
        mode: "sync" for `with model.trace(...)`, "async" for `async with model.trace(...)`.
        dispatch: load the weights now; otherwise the first trace, `dispatch()` or entering the model does.
        device: where the model goes once it has been loaded; None: where `from_pretrained` leaves it.
        tokenizer: that of a model which has been loaded; None: that of the repository.
        rename: other names for modules, as for `VLLM`.
        max_save_bytes: what one run may save, in bytes.
        max_buffered_bytes, slow_consumers: as for `VLLM`.
        block_timeout: seconds that a block may run between two locations before its run fails; a call of C is not
            interrupted, and its time counts (that of `backward()`, say). `math.inf`: as long as it likes.
        from_pretrained: everything that `from_pretrained` takes: `dtype`, `device_map`, `quantization_config`, ...

    Raises:
        ValueError: an unknown `mode`, or unknown `slow_consumers`.
        TypeError: a keyword that looks like another one, or is for `from_pretrained` beside a loaded model.
    """

    _not_here = "{0} is not of a model: a tracer makes barriers, and backward() is called on a tensor in a block"

    def __init__(
        self,
        repo: Any,
        *,
        mode: Mode = "sync",
        dispatch: bool = False,
        device: Any = None,
        tokenizer: Any = None,
        rename: Mapping[str, str] | None = None,
        max_save_bytes: int = 1 << 30,
        max_buffered_bytes: int = 1 << 30,
        slow_consumers: SlowConsumers = "fail",
        block_timeout: float = BLOCK_TIMEOUT,
        **from_pretrained: Any,
    ) -> None:
        if mode not in ("sync", "async"):
            raise ValueError(f"mode is 'sync' or 'async', not {mode!r}")
        if slow_consumers not in ("fail", "drop"):
            raise ValueError(f"slow_consumers is 'fail' or 'drop', not {slow_consumers!r}")
        check_arguments(repo, from_pretrained, inspect.signature(type(self)).parameters)
        self.mode: Mode = mode
        limits = RunLimits(max_save_bytes, max_buffered_bytes, slow_consumers, block_timeout)
        self._held = Held(repo, from_pretrained, device, tokenizer, rename, limits)
        self._scanner = Scanner(self._held.build_hollow, self.owners)
        self.repo = self._held.name
        if dispatch:
            self._build()

    @property
    def tree(self) -> Envoy:
        """The root module."""
        return self._held.root

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, as transformers loads it; None if there is none."""
        return self._held.loaded.tokenizer

    @property
    def module(self) -> Any:
        """The model itself, with its weights; None before they have been loaded."""
        return None if self._held.engine is None else self._held.engine.loaded.model

    # -- life ------------------------------------------------------------------------------------------------------

    @property
    def dispatched(self) -> bool:
        """Whether the weights have been loaded, and the model not closed."""
        return self._held.engine is not None and not self._held.closed

    def dispatch(self) -> Any:
        """Load the weights if they have not been; in async mode, `await model.dispatch()`."""
        return asyncio.to_thread(self._build) if self.mode == "async" else self._build()

    def close(self) -> None:
        """Let go of the weights; closing again does nothing."""
        self._held.close()
        self._scanner.close()

    def __enter__(self) -> Self:
        self._build()
        return self

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._build)
        return self

    # -- runs ------------------------------------------------------------------------------------------------------

    @overload
    def trace(self, prompt: Any, /, **sampling: Any) -> Trace: ...
    @overload
    def trace(self, **sampling: Any) -> LocalInvokeTrace: ...
    def trace(self, prompt: Any = ABSENT, **sampling: Any) -> Trace | LocalInvokeTrace:
        """`with model.trace(prompt, ...)`: one forward pass, with the body of the `with` as its block.

        Without a prompt the body runs as it stands, and each `with tracer.invoke(prompt, ...):` in it is one prompt of
        the batch. `sampling`: `max_tokens` (1 unless given), `temperature`, `top_p`, `top_k`, `seed`, `stop`, ...,
        `edits` and `gradients`. Raises `TypeError` for an unknown one and `ValueError` for a bad value or an empty
        prompt.
        """
        return self._trace(prompt, sampling, {}, "trace()")

    def run(self, prompt: Any, probe: Callable[[Any, Any], object], **sampling: Any) -> ProbeRun:
        """Run a prompt with the function `probe(model, tracer)` as its block; arguments as for `trace`."""
        return ProbeRun(self, self._request(prompt, sampling, {}, "run()"), from_function(probe, self.owners()))

    def map(
        self,
        prompts: Iterable[Any] | AsyncIterable[Any],
        probe: Callable[[Any, Any], object],
        *,
        concurrency: int = 8,
        ordered: bool = False,
        progress: bool = True,
        return_errors: bool = False,
        **sampling: Any,
    ) -> Map:
        """Run each of many prompts with the function `probe(model, tracer)` as its block, as on `VLLM`."""
        asked, block = settings(sampling, {}, "map()"), from_function(probe, self.owners())
        return Map(
            self,
            prompts,
            lambda prompt: planned(asked.on(given_prompt(prompt, self._chat)), block),
            Window(concurrency, ordered=ordered),
            asynchronous=self.mode == "async",
            progress=progress,
            return_errors=return_errors,
        )

    def generate(self, prompts: Any = ABSENT, **sampling: Any) -> Any:
        """`with model.generate(prompt, ...) as tracer:`: many forward passes, with a block.

        `max_tokens` is 20 unless given, and tokens are drawn as the model's generation config says. Without a `with`,
        prompts are run without a block: a list of outputs; in async mode, awaitable.
        """
        entered = is_entered(caller())
        if prompts is ABSENT and self.mode == "sync" and not entered:
            raise ValueError("generate() needs prompts, unless it stands in a `with`")
        defaults = {"max_tokens": GENERATED, **self._drawn_as_configured()}
        if prompts is ABSENT or (entered and self.mode == "sync"):
            return self._trace(prompts, sampling, defaults, "generate()")
        asked = settings(sampling, defaults, "generate()")
        several = prompts if is_several(prompts) else [prompts]
        requests = [asked.on(given_prompt(prompt, self._chat)) for prompt in several]
        generation = Generation(self, requests, self.mode == "async", carries=in_session(self))
        return generation if self.mode == "async" else generation.result()

    def scan(self, prompt: Any, **sampling: Any) -> Trace:
        """`with model.scan(prompt)`: a trace on a model without weights, whose tensors have shapes and no values.

        What is saved is on the device "meta". No weights are loaded for it.
        """
        request = self._request(prompt, sampling, {}, "scan()")
        return Trace(self._scanner, request, self.mode == "async", carries=in_session(self))

    def session(self) -> Session:
        """`with model.session():` several traces, of which later ones use what earlier ones have bound.

        The body runs as it stands. A trace in it waits for its run, in async mode without blocking the event loop, and
        names that its block has bound hold their values then, saved or not, where the code around reads them. No
        gradient reaches from one trace back to another.
        """
        return Session(self, self.mode == "async")

    # -- edits -----------------------------------------------------------------------------------------------------

    def edit(self, probe: Callable[[Any, Any], object] | str | None = None, *, name: str | None = None) -> Any:
        """`with model.edit(name) as (tracer, edit):`: install a block that every run executes before its own.

        Instead of the `with`, a function `probe(model, tracer)`; then this returns the `Edit` (in async mode, to be
        awaited). Raises `ValueError` if an edit of that name is installed.
        """
        if isinstance(probe, str):
            probe, name = None, probe
        return self._edit(None if probe is None else from_function(probe, self.owners()), name)

    def install(self, edit: Installed) -> None:
        """Install an edit, loading the weights first if need be."""
        self._build().install(edit)

    async def ainstall(self, edit: Installed) -> None:
        """`install`, without blocking the event loop."""
        await asyncio.to_thread(self.install, edit)

    def _installed(self) -> Sequence[Installed]:
        engine = self._held.engine
        return engine.edits.installed if engine is not None and not self._held.closed else ()

    def _clear(self, numbers: list[int] | None) -> Future[None] | None:
        engine = self._held.engine
        return None if engine is None or self._held.closed else engine.clear(numbers)

    # -- for runs --------------------------------------------------------------------------------------------------

    def stats(self) -> Any:
        """Counts of what runs hold now; in async mode, `await model.stats()`."""
        if self._held.engine is None:
            raise EngineClosedError("the weights have not been loaded yet: call dispatch() first")
        counts = self._held.engine.counts()
        return asyncio.wrap_future(counts) if self.mode == "async" else counts.result()

    def owners(self) -> tuple[object, ...]:
        """What the modules belong to that blocks on this model may use."""
        return (self, *self._held.owners)

    def launch(self, job: Job) -> None:
        """Start a run, or several as one batch, loading the weights first if need be."""
        engine = self._build()
        try:
            engine.submit(list(job.runs()))
        except BaseException:
            job.cancel()
            raise

    async def alaunch(self, job: Job) -> None:
        """`launch`, without blocking the event loop while the weights are loaded."""
        if not self.dispatched:
            await asyncio.to_thread(self._build)
        self.launch(job)

    def _trace(
        self, prompt: Any, sampling: Mapping[str, Any], defaults: Mapping[str, Any], what: str
    ) -> Trace | LocalInvokeTrace:
        asynchronous = self.mode == "async"
        if prompt is not ABSENT:
            request = self._request(prompt, sampling, defaults, what)
            return Trace(self, request, asynchronous, carries=in_session(self))
        settings(sampling, defaults, what)  # an error belongs here, and not to the first invoke
        return LocalInvokeTrace(
            self,
            lambda prompt, own: self._request(prompt, over(sampling, own, "invoke()"), defaults, "invoke()"),
            asynchronous,
            carries=in_session(self),
        )

    def _request(self, prompt: Any, options: Mapping[str, Any], defaults: Mapping[str, Any], what: str) -> Request:
        request = settings(options, defaults, what)
        request.prompt = given_prompt(prompt, self._chat)
        return request

    def _chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    def _drawn_as_configured(self) -> dict[str, Any]:
        return generation_defaults(self._held.loaded.generation_config)

    def _build(self) -> LocalEngine:
        return self._held.build()
