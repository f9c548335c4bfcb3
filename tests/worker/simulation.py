"""The worker's and the caller's side of runs in one thread, under a scheduler that does what a test tells it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from vllm import CompletionOutput, RequestOutput

from nnsight_async.capture.function import from_function
from nnsight_async.interleave.interleaver import Interleaver, Limits
from nnsight_async.runs import frames
from nnsight_async.runs.edit import Installed
from nnsight_async.runs.frames import Frame, Message, Together
from nnsight_async.runs.packing import Tensors
from nnsight_async.runs.request import Request
from nnsight_async.runs.run import Run
from nnsight_async.runs.shipment import Shipment
from nnsight_async.tree.describe import describe
from nnsight_async.tree.envoy import Envoy
from nnsight_async.tree.model import ModelView
from nnsight_async.tree.passes import aliases_of, order_of
from nnsight_async.tree.record import record
from nnsight_async.worker.blocks import Blocks, Edit
from nnsight_async.worker.composition import Composition
from nnsight_async.worker.outbox import Outbox
from tests.worker.causal import VOCABULARY, Causal, Part

PATIENCE = 600.0
"""Seconds that a turn of a block may take: a machine may stand still for some, or collect its garbage meanwhile."""


class Letters(Outbox):
    """An outbox whose messages stay here, encoded and decoded as on their way."""

    def __init__(self) -> None:
        self._frames: list[Frame] = []
        self._together: list[Together] = []
        self._tensors = Tensors()
        self.together = 0
        """How many steps of runs were reported with those of others."""
        self.waiting: list[Frame] = []

    def flush(self) -> None:
        if self._frames or self._together:
            message = Message(self._tensors.kinds, self._frames, together=self._together)
            parts = frames.encode(message, self._tensors.join())
            self.waiting += frames.decode([bytes(part) for part in parts])
        self.together += sum(len(each.keys) for each in self._together)
        self._frames, self._together, self._tensors = [], [], Tensors()

    def take(self) -> list[Frame]:
        taken, self.waiting = self.waiting, []
        return taken


class NoCache:
    """In the place of `Recycling`."""

    def hand_over(self, *_: Any) -> None: ...
    def arrive(self, *_: Any) -> None: ...
    def part(self, *_: Any) -> None: ...


class NoAdapters:
    """In the place of `Adapters`."""

    def provide(self, request: Any, *, again: bool) -> None: ...

    def part(self, requests: Any) -> None: ...


@dataclass
class Served:
    """A request on the simulated engine."""

    name: str
    prompt: list[int]
    max_tokens: int
    stops_below: int
    run: Run
    params: Any
    ids: list[int] = field(default_factory=list)
    computed: int = 0
    arrived: bool = False
    finished: bool = False

    @property
    def over(self) -> bool:
        return bool(self.ids) and (len(self.ids) == self.max_tokens or self.ids[-1] < self.stops_below)


class Simulation:
    def __init__(self) -> None:
        self.letters = Letters()
        self.requests: dict[str, Served] = {}
        self._finished: set[str] = set()
        self.replayed = 0
        self.build()

    def build(self) -> None:
        self.model = Causal()
        calls = record(self.model, self._dummy)
        self.blocks = self.blocks_for(calls, Interleaver)

    def blocks_for(self, calls: Any, make: Callable[..., Interleaver], kind: type[Blocks] = Blocks) -> Blocks:
        manifest = describe(self.model, calls=calls)
        view = ModelView(Envoy(manifest))
        interleaver = make(
            self.model, order_of(manifest), self.letters.report, view, aliases_of(manifest), Limits(VOCABULARY, 256)
        )
        interleaver.crews.report = self.letters.report_together if interleaver.plans else None
        return kind(interleaver, self.letters, torch.device("cpu"), NoCache(), NoAdapters())  # type: ignore[arg-type]

    def _dummy(self) -> None:
        self.model.compute_logits(self.model(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long)))

    def add(self, prompt: Sequence[int], probe: Any, max_tokens: int, stops_below: int = 0, edit: Any = None) -> Served:
        params = SimpleNamespace(extra_args=None)
        block = from_function(probe) if probe is not None else None
        run = Run(Request({"prompt_token_ids": list(prompt)}, params), block)
        if edit is not None:
            run.ride([Installed(from_function(edit), None, rowwise=False)])
            self.blocks.install(run.edits[0].number, Edit(run.edits[0].block.payload, rowwise=False), PATIENCE)
        if run.has_blocks:
            payload, edits = block and block.payload, tuple(each.number for each in run.edits)
            Shipment((run.key,), payload, 1 << 30, PATIENCE, edits).onto(params)
        served = Served(f"request {len(self.requests)}", list(prompt), max_tokens, stops_below, run, params)
        self.requests[served.name] = served
        return served

    # -- what a scheduler does -------------------------------------------------------------------------------------

    def preempt(self, served: Served) -> None:
        """Drop what has been computed of a request; all its tokens come once more when it is next in a step."""
        self.replayed += served.computed > 0
        served.computed = 0
        self.drop(served.name)

    def finish(self, served: Served) -> None:
        """The worker is told with the next step that a request is over."""
        if not served.finished:
            self._finished.add(served.name)
        served.finished = True
        self.drop(served.name)

    def drop(self, request: str) -> None:
        """Nothing that has been computed of the request is kept."""
        self.model.cache.drop(request)

    def schedule(self, scheduled: Any) -> None:
        self.blocks.schedule(scheduled)

    def step(self, present: Iterable[Served]) -> dict[str, int]:
        """One forward pass over requests, in this order; returns the tokens drawn."""
        present = list(present)
        self._announce(present)
        parts, ids, positions = [], [], []
        for served in present:
            tokens = [*served.prompt, *served.ids][served.computed :]
            parts.append(Part(served.name, len(ids), len(ids) + len(tokens), served.computed))
            ids += tokens
            positions += range(served.computed, served.computed + len(tokens))
            served.computed += len(tokens)
        if not present:
            return {}
        samples = self.forward(parts, torch.tensor(ids), torch.tensor(positions))
        return {served.name: int(sample) for served, sample in zip(present, samples, strict=True)}

    @torch.inference_mode()
    def forward(self, parts: list[Part], ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.model.cache.parts = parts
        starts = [part.start for part in parts] + [parts[-1].stop]
        names = [part.request for part in parts]
        self.blocks.begin_step(Composition(names, starts, [part.computed for part in parts], len(ids)))
        hidden = self.model(ids, positions)
        self.blocks.begin_sampling()
        logits = self.blocks.logits(self.model.compute_logits(hidden[torch.tensor(starts[1:]) - 1]))
        samples = self.blocks.samples(logits.argmax(-1, keepdim=True).to(torch.int32))
        self.blocks.end_step()
        return samples

    def _announce(self, present: list[Served]) -> None:
        new = [served for served in present if not served.arrived]
        for served in new:
            served.arrived = True
        arriving = [
            SimpleNamespace(
                req_id=each.name, sampling_params=each.params, prompt_token_ids=each.prompt, lora_request=None
            )
            for each in new
        ]
        scheduled: Any = SimpleNamespace(
            scheduled_new_reqs=arriving,
            finished_req_ids=self._finished,
            num_scheduled_tokens={served.name: 1 for served in present},
        )
        self.schedule(scheduled)
        self._finished = set()

    # -- what comes back -------------------------------------------------------------------------------------------

    def deliver(self, letters: Iterable[Frame]) -> None:
        runs = {served.run.key: served.run for served in self.requests.values()}
        for frame in letters:
            runs[frame.key].feed_frame(frame)

    def tell(self, served: Served, token: int) -> None:
        """A token has been drawn."""
        served.ids.append(token)
        reason = "stop" if token < served.stops_below else "length"
        completion = CompletionOutput(
            0, f"<{token}>", [token], None, None, finish_reason=reason if served.over else None
        )
        served.run.feed_output(RequestOutput(served.name, None, served.prompt, None, [completion], served.over))
