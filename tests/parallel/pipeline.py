"""The simulated engine on the stages of a pipeline, each a thread."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from nnsight_async.interleave.interleaver import Limits
from nnsight_async.interleave.stages import Staged
from nnsight_async.tree.describe import describe
from nnsight_async.tree.envoy import Envoy
from nnsight_async.tree.manifest import Manifest
from nnsight_async.tree.model import ModelView
from nnsight_async.tree.passes import aliases_of, order_of
from nnsight_async.tree.record import record
from nnsight_async.worker.blocks import Blocks, Edit
from nnsight_async.worker.composition import Composition
from nnsight_async.worker.stages import Cut, Has, StagedBlocks, Unheard, has, seen_from
from nnsight_async.worker.wire import packed, unpacked
from tests.worker.causal import LAYERS, VOCABULARY, WIDTH, Causal, Decoder, Part
from tests.worker.simulation import NoAdapters, NoCache, Simulation

PATIENCE = 20.0  # seconds


class PPMissingLayer(torch.nn.Identity):
    """Stands for what another stage has, under vLLM's name."""


class IntermediateTensors(dict[str, torch.Tensor]):
    """What goes to the next stage, under vLLM's name."""


class Stretch(Decoder):
    """Some of the layers."""

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, passed: Any = None) -> Any:  # type: ignore[override]
        hidden, residual = (self.embed_tokens(ids), None) if passed is None else (passed["hidden"], passed["residual"])
        for layer in self.layers:
            if not isinstance(layer, PPMissingLayer):
                hidden, residual = layer(positions, hidden, residual)
        if isinstance(self.norm, PPMissingLayer):
            return IntermediateTensors(hidden=hidden, residual=residual)
        hidden, _ = self.norm(hidden, residual)
        return hidden


class StageModel(Causal):
    def forward(self, ids: torch.Tensor, positions: torch.Tensor, *passed: Any) -> Any:
        return self.model(ids, positions, *passed)


def stage_of(number: int, size: int) -> StageModel:
    """What one stage has of the causal model."""
    model = StageModel()
    model.model.__class__ = Stretch
    for layer in range(LAYERS):
        if layer * size // LAYERS != number:
            model.model.layers[layer] = PPMissingLayer()
    if number > 0:
        model.model.embed_tokens = PPMissingLayer()  # type: ignore[assignment]
    if number < size - 1:
        model.model.norm = PPMissingLayer()  # type: ignore[assignment]
        model.lm_head = PPMissingLayer()  # type: ignore[assignment]
        del model.logits_processor
    return model


class ThreadWire:
    """The `Wire` of one thread. What goes over it is packed as between processes."""

    def __init__(self, stage: int, queues: dict[tuple[int, int], queue.SimpleQueue[Any]], asked: list[Any]) -> None:
        self._stage, self._queues, self._asked = stage, queues, asked
        self._looks = 0

    def say(self, message: object, stages: Iterable[int]) -> None:
        for stage in stages:
            self._queues[self._stage, stage].put([bytes(frame) for frame in packed(message)])

    def hear(self, stage: int) -> Any:
        return unpacked(self._queues[stage, self._stage].get(timeout=PATIENCE))

    def heard(self, stage: int) -> bool:
        self._looks += 1  # some of the time it is still on its way
        return self._looks % 5 < 2 and not self._queues[stage, self._stage].empty()

    def ask(self, stage: int, question: object) -> Any:
        with ThreadPoolExecutor(1) as thread:  # as in a process of its own
            answer = thread.submit(self._asked[stage], unpacked(packed(question))).result(timeout=PATIENCE)
        return unpacked(packed(answer))


class Stage(Simulation):
    """What one stage has of the simulated engine."""

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size
        super().__init__()

    def build(self) -> None:
        self.model = stage_of(self.number, self.size)
        self.cut = Cut()
        calls = record(self.model, self._dummy, self.cut)
        self.mine: Has = has(self.model, describe(self.model, calls=calls), self.cut)

    def _dummy(self) -> None:
        nothing = torch.zeros(1, WIDTH, dtype=torch.double)
        passed = None if self.number == 0 else IntermediateTensors(hidden=nothing, residual=nothing)
        given = () if passed is None else (passed,)
        hidden = self.model(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long), *given)
        if self.number == self.size - 1:
            self.model.compute_logits(hidden)

    def join(self, all_have: list[Has], queues: dict[tuple[int, int], Any], asked: list[Any]) -> Manifest:
        manifest, stages = seen_from(self.number, all_have, self.model)
        if not stages.is_last:
            self.letters = Unheard("", torch.device("cpu"))  # type: ignore[assignment]

        def wire(answer: Callable[[Any], Any]) -> ThreadWire:
            asked[self.number] = answer
            return ThreadWire(self.number, queues, asked)

        interleaver = Staged(
            self.model,
            order_of(manifest),
            self.letters.report,
            ModelView(Envoy(manifest)),
            aliases_of(manifest),
            Limits(VOCABULARY, 256),
            stages=stages,
            wire=wire,
        )
        self.blocks = StagedBlocks(interleaver, self.letters, torch.device("cpu"), NoCache(), NoAdapters())  # type: ignore[arg-type]
        return manifest

    @torch.inference_mode()
    def pass_through(self, parts: list[Part], ids: torch.Tensor, positions: torch.Tensor, passed: Any) -> Any:
        """This stage's part of a step; returns what it hands on, or the tokens."""
        self.model.cache.parts = parts
        starts = [part.start for part in parts] + [parts[-1].stop]
        names = [part.request for part in parts]
        self.blocks.begin_step(Composition(names, starts, [part.computed for part in parts], len(ids)))
        hidden = self.model(ids, positions, *(() if passed is None else (passed,)))
        self.blocks.pass_on()  # type: ignore[attr-defined]
        if self.number < self.size - 1:
            self.blocks.end_step()
            return hidden
        self.blocks.begin_sampling()
        logits = self.blocks.logits(self.model.compute_logits(hidden[torch.tensor(starts[1:]) - 1]))
        samples = self.blocks.samples(logits.argmax(-1, keepdim=True).to(torch.int32))
        self.blocks.end_step()
        return samples


class Pipeline(Simulation):
    """All stages; what a test does to it, is done to each in a thread of its own."""

    def __init__(self, size: int = 2) -> None:
        self._size = size
        super().__init__()

    def build(self) -> None:
        self._threads = [ThreadPoolExecutor(1) for _ in range(self._size)]
        # One after the other: they share torch's random numbers.
        self.stages = [thread.submit(Stage, number, self._size).result() for number, thread in enumerate(self._threads)]
        queues = {(one, other): queue.SimpleQueue() for one in range(self._size) for other in range(self._size)}
        have: list[Has] = [unpacked(packed(stage.mine)) for stage in self.stages]
        manifests = self._each(partial(Stage.join, all_have=have, queues=queues, asked=[None] * self._size))
        assert len({manifest.encode() for manifest in manifests}) == 1
        self.manifest = manifests[0]
        self.last = self.stages[-1]
        self.blocks, self.letters = self.last.blocks, self.last.letters
        self.install = self.blocks.install
        self.blocks.install = self._install  # type: ignore[method-assign]

    def drop(self, request: str) -> None:
        self._each(lambda stage: Simulation.drop(stage, request))

    def schedule(self, scheduled: Any) -> None:
        self._each(lambda stage: Simulation.schedule(stage, scheduled))

    def forward(self, parts: list[Part], ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        passed = None
        for thread, stage in zip(self._threads, self.stages, strict=True):
            passed = thread.submit(stage.pass_through, parts, ids, positions, passed).result()
        assert isinstance(passed, torch.Tensor)
        return passed

    def clear(self, numbers: list[int]) -> None:
        self._each(lambda stage: stage.blocks.clear(numbers))

    def _install(self, number: int, edit: Edit, timeout: float) -> None:
        self.install(number, edit, timeout)
        for stage in self.stages[:-1]:
            stage.blocks.install(number, edit, timeout)

    def _each(self, work: Callable[[Stage], Any]) -> list[Any]:
        pairs = zip(self._threads, self.stages, strict=True)
        return [each.result() for each in [thread.submit(work, stage) for thread, stage in pairs]]

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()

    @property
    def every_blocks(self) -> list[Blocks]:
        return [stage.blocks for stage in self.stages]
