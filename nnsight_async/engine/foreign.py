"""Requests that come through vLLM's own interface, and run the edits of the engine all the same."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nnsight_async.engine.sampling import edit_names, mistake
from nnsight_async.runs import echo, failures
from nnsight_async.runs.ledger import Ledger
from nnsight_async.runs.ops import ShippedOps
from nnsight_async.runs.run import new_key
from nnsight_async.runs.shipment import KEY, Shipment

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

    from nnsight_async.capture.block import Block
    from nnsight_async.engine.adapters import Adapters
    from nnsight_async.engine.edits import Edits
    from nnsight_async.engine.engine import Limits
    from nnsight_async.engine.prefixes import Prefixes
    from nnsight_async.runs.edit import Installed
    from nnsight_async.runs.frames import Frame
    from nnsight_async.runs.unread import Unread

ARGUMENT = "edits"
"""The entry in `SamplingParams.extra_args` (`vllm_xargs` of the OpenAI API) by which a request chooses."""


@dataclass(slots=True)
class _Sequence:
    """One of the `n` sequences of a request: its values, and how many tokens have been let out and have come."""

    ledger: Ledger
    tokens: int = 0
    finished: bool = False
    failure: tuple[int | None, BaseException] | None = None

    @property
    def beyond(self) -> int:
        """Tokens that have come though an edit asked for the end before them."""
        stopped = self.ledger.stopped_at
        return 0 if stopped is None else max(self.tokens - stopped - 1, 0)

    @property
    def ended(self) -> bool:
        """Whether no token of it is let out any more."""
        stopped = self.ledger.stopped_at
        return self.finished or (stopped is not None and self.tokens > stopped)

    def failed(self) -> BaseException | None:
        """What its edits raised, once all tokens from before that are out; nothing of a step past the end."""
        if self.failure is None:
            return None
        step, error = self.failure
        if step is None:
            return error if self.finished else None
        return error if self.tokens >= step and not (self.finished and self.tokens == step) else None


def _nowhere(output: Any) -> None:
    """Before anybody reads."""


@dataclass(slots=True, eq=False)
class Foreign:
    """A request whose outputs wait for what its edits saved, and then go where vLLM's caller reads them.

    `RequestOutput.saves` of the last one has the values: those of one sequence, or by name a list of `n`.
    """

    edits: Sequence[Installed]
    count: int
    decode: Callable[[list[int]], str]
    lora: LoRARequest | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)
    keys: tuple[int, ...] = ()
    error: BaseException | None = None
    _give: Callable[[Any], None] = _nowhere
    _collector: Any = None
    _cumulative: bool = False
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    _pending: deque[Any] = field(default_factory=deque[Any])
    _blocks: list[Block] = field(default_factory=list[Any])
    _sequences: dict[int, _Sequence] = field(default_factory=dict[int, _Sequence])

    def __post_init__(self) -> None:
        self.keys = tuple(new_key() for _ in range(self.count))
        operated = any(edit.ops for edit in self.edits)
        self._blocks = [edit.block for edit in self.edits if not edit.ops]
        labels = [str(edit) for edit in self.edits if not edit.ops]
        labels += [*(["a declared operation"] if operated else []), *(["the adapter"] if self.lora is not None else [])]
        self._sequences = {key: _Sequence(Ledger(labels)) for key in self.keys}

    def feed(self, collector: Any, *, delta: bool) -> None:
        """`collector` is what vLLM's caller reads; its outputs come by us from here on."""
        self._collector, self._give, collector.put = collector, collector.put, self.put
        self._cumulative = not delta
        early, collector.output = collector.output, None
        if early is not None:
            collector.ready.clear()
            self.put(early)

    def put(self, output: Any) -> None:
        """Take one of vLLM's outputs. Called by the task that serves all requests: nothing may be raised here."""
        if isinstance(output, Exception):
            self.fail(output)
        elif not self.over.is_set():
            self._pending.append(output)
            try:
                self._advance()
            except Exception as error:  # in making values: there may be no memory
                self.fail(error)

    def feed_frame(self, frame: Frame | Unread) -> None:
        """Take what the worker sent at the end of a step."""
        sequence = self._sequences[frame.key]
        if frame.printed:
            echo.echo(frame.key, frame.printed)
        for warned in frame.warned:
            echo.warn(warned)
        sequence.ledger.file(frame)
        if frame.error is not None and sequence.failure is None:
            error = failures.unpack(frame.error, self._beginning(frame.part))
            sequence.failure = None if frame.ended else frame.step, error
        self._advance()

    def awaited(self) -> list[tuple[int, Ledger]]:
        """The sequences, by key and ledger, of which vLLM has told more than the worker."""
        if self.over.is_set() or not self._pending:
            return []
        waits = [self.keys[completion.index] for completion in self._pending[0].outputs if not self._holds(completion)]
        return [(key, self._sequences[key].ledger) for key in waits]

    @property
    def settled(self) -> bool:
        """Whether its caller has all that there will be."""
        return self.over.is_set()

    def fail(self, error: BaseException) -> None:
        """End the request with `error`, which its caller gets."""
        if not self.over.is_set():
            self.error = error
            self._end(error)

    def _beginning(self, part: int) -> failures.Place | None:
        if part >= len(self._blocks):  # operations, or the adapter
            return None
        block = self._blocks[part]
        return block.filename, block.first_line, block.function

    def _advance(self) -> None:
        while self._pending and not self.over.is_set() and self._is_complete(self._pending[0]):
            self._let_out(self._pending.popleft())
        for sequence in self._sequences.values():
            error = sequence.failed()
            if error is not None:
                self.fail(error)
        if all(sequence.ended for sequence in self._sequences.values()):
            self.stopped.set()

    def _is_complete(self, output: Any) -> bool:
        """Whether all that the steps of an output save has come."""
        return all(self._holds(completion) for completion in output.outputs)

    def _holds(self, completion: Any) -> bool:
        sequence = self._sequences[self.keys[completion.index]]
        tokens = self._tokens(sequence, completion)
        ledger, failure = sequence.ledger, sequence.failure
        if failure is not None and failure[0] is not None and failure[0] <= tokens:
            return True
        if completion.finish_reason is None:
            return ledger.holds(tokens - 1)
        return ledger.done or completion.finish_reason == "abort"  # which the worker may have had no part in

    def _tokens(self, sequence: _Sequence, completion: Any) -> int:
        return len(completion.token_ids) + (0 if self._cumulative else sequence.tokens)

    def _let_out(self, output: Any) -> None:
        for completion in output.outputs:
            sequence = self._sequences[self.keys[completion.index]]
            before, sequence.tokens = sequence.tokens, self._tokens(sequence, completion)
            sequence.finished = completion.finish_reason is not None
            if sequence.beyond:
                self._cut(completion, min(sequence.beyond, len(completion.token_ids)))
                sequence.tokens -= sequence.beyond
            for step in range(before, sequence.tokens):
                sequence.ledger.let_out(step)
            if sequence.finished and sequence.ledger.stopped_at is not None:
                completion.finish_reason = "stop"
            if (error := sequence.failed()) is not None:
                self.fail(error)
                return
        if not output.finished:
            self._give(output)
            return
        values = self._values()
        self._end(output)
        if self.edits:
            self._collector.output.saves = values  # on `output`, or what it was added to and waits to be read

    def _values(self) -> dict[str, Any]:
        for sequence in self._sequences.values():
            sequence.ledger.close()
        found = [sequence.ledger.values for sequence in self._sequences.values()]
        if len(found) == 1:
            return found[0]
        return {name: [values.get(name) for values in found] for name in dict.fromkeys(n for v in found for n in v)}

    def _end(self, last: Any) -> None:
        self._pending.clear()
        self.over.set()
        for key in self.keys:
            echo.forget(key)
        self._give(last)

    def _cut(self, completion: Any, beyond: int) -> None:
        completion.token_ids = list(completion.token_ids)[:-beyond]
        completion.text = self.decode(completion.token_ids)
        if completion.logprobs:
            completion.logprobs = completion.logprobs[:-beyond]


class ForeignRequests:
    """Has everything that is asked of `AsyncLLM` itself run the edits of the engine; and what has a LoRA adapter that
    cannot be loaded fails alone.

    `AsyncLLM.add_request` is what all of vLLM's own servers and methods come to (0.32, 0.33).
    """

    def __init__(
        self,
        llm: AsyncLLM,
        edits: Edits,
        adapters: Adapters,
        runs: dict[int, Any],
        limits: Limits,
        prefixes: Prefixes,
        watch: Callable[[], None],
    ) -> None:
        self._llm: Any = llm
        self._edits = edits
        self._adapters = adapters
        self._runs = runs
        self._limits = limits
        self._prefixes = prefixes
        self._watch = watch
        self._seeing: set[asyncio.Task[None]] = set()
        self._add = llm.add_request
        self._llm.add_request = self.add

    async def add(self, request_id: str, prompt: Any, params: Any, *more: Any, **options: Any) -> Any:
        """In the place of `AsyncLLM.add_request`."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine import EngineCoreRequest

        ready = isinstance(prompt, EngineCoreRequest)  # which has parameters and an adapter of its own
        params = prompt.params if ready else params
        sampling = isinstance(params, SamplingParams)
        if sampling and (why := mistake(params)) is not None:  # at which vLLM does not look, and its engine would end
            raise VLLMValidationError(why)
        if sampling and KEY in (params.extra_args or {}):  # which would name runs and edits of others to the worker
            raise VLLMValidationError(f"extra_args[{KEY!r}] is not for requests")
        edits = self._chosen(params) if sampling else ()
        lora = prompt.lora_request if ready else self._lora(*more, **options)
        if not sampling or (not edits and lora is None):
            return await self._add(request_id, prompt, params, *more, **options)
        if isinstance(prompt, AsyncGenerator):
            raise VLLMValidationError("a prompt that streams in cannot run edits; send it whole, or clear them")
        foreign, params = Foreign(edits, params.n, self._decode, lora), copy(params)
        Shipment(
            foreign.keys,
            None,
            self._limits.save_bytes,
            self._limits.block_seconds,
            tuple(edit.number for edit in edits if not edit.ops),
            lora is not None,
            ShippedOps.of(replace(op, edit=edit.number) for edit in edits for op in edit.ops),
        ).onto(params)
        if ready:
            prompt = copy(prompt)
            prompt.sampling_params = params
        if lora is not None:
            self._adapters.check(lora, foreign)
        changes = self._adapters.changes(lora)
        prompt = self._prefixes.apart(prompt, params, foreign.keys[0], edits, block=False, adapter=changes)
        self._runs.update(dict.fromkeys(foreign.keys, foreign))
        self._watch()
        try:
            collector = await self._add(request_id, prompt, params, *more, **options)
        except BaseException:
            self._forget(foreign)
            raise
        foreign.feed(collector, delta=params.output_kind == RequestOutputKind.DELTA)
        task = asyncio.ensure_future(self._see_out(foreign, collector.request_id))
        self._seeing.add(task)
        task.add_done_callback(self._seeing.discard)
        return collector

    def _chosen(self, params: Any) -> Sequence[Installed]:
        from vllm.exceptions import VLLMValidationError

        named = (params.extra_args or {}).get(ARGUMENT)
        try:
            return self._edits.chosen((named,) if isinstance(named, str) else edit_names(named))
        except (TypeError, ValueError) as error:  # as what vLLM's servers answer as the mistake of a request
            raise VLLMValidationError(str(error)) from None

    def _lora(self, arrival_time: Any = None, lora_request: Any = None, *_: Any, **__: Any) -> Any:
        """The adapter among the arguments of `AsyncLLM.add_request`."""
        return lora_request

    async def _see_out(self, foreign: Foreign, request: str) -> None:
        over, stopped = (asyncio.ensure_future(event.wait()) for event in (foreign.over, foreign.stopped))
        try:
            await asyncio.wait({over, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if foreign.error is not None or not foreign.over.is_set():
                await self._llm.abort(request, internal=True)  # its last output is what there is
            await over
        finally:
            stopped.cancel()
            self._forget(foreign)

    def _forget(self, foreign: Foreign) -> None:
        for key in foreign.keys:
            self._runs.pop(key, None)
        if foreign.lora is not None:
            self._adapters.let_go(foreign.lora, foreign)

    def _decode(self, ids: list[int]) -> str:
        return self._llm.get_tokenizer().decode(ids) if ids else ""
