"""What is made of another kind where the layers of a model are divided among the stages of a pipeline."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from vllm import envs
from vllm.distributed.parallel_state import get_pp_group

from nnsight_async.interleave.passed import PLAIN, Far, Opaque, Stages
from nnsight_async.interleave.stages import Staged
from nnsight_async.tree.stages import MISSING, Part, whole
from nnsight_async.worker.blocks import Blocks
from nnsight_async.worker.entries import around
from nnsight_async.worker.last_words import HOME
from nnsight_async.worker.outbox import NoOutbox
from nnsight_async.worker.wire import ProcessWire

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from nnsight_async.interleave.block import BlockRun
    from nnsight_async.interleave.interleaver import Interleaver
    from nnsight_async.tree.manifest import Manifest
    from nnsight_async.worker.composition import Composition


PASSED_ON = "IntermediateTensors"
"""The class of what a stage returns to the next one (vLLM 0.32, 0.33)."""


class Outline(NamedTuple):
    """What other stages have of a module: its class, its plain attributes, and the names of the others."""

    cls: type[torch.nn.Module]
    plain: dict[str, Any]
    tensors: tuple[str, ...]
    others: dict[str, str]


class Cut:
    """Is shown a forward pass, and notes which modules it leaves before the last stage."""

    def __init__(self) -> None:
        self.paths: set[str] = set()

    def __call__(self, path: str, kind: str, value: Any, /) -> None:
        if kind == "output" and type(value).__name__ == PASSED_ON:
            self.paths.add(path)


class PipelineParallel:
    """The pipeline of this worker. `observed` is to be shown a forward pass before `whole` is called."""

    def __init__(self, runner: Any) -> None:
        self._group: Any = get_pp_group()
        self._runner = runner
        self.observed = Cut()
        self.stage: int = self._group.rank_in_group
        self.leads: bool = self._group.is_last_rank
        """Whether what comes of blocks goes home from here."""
        self._stages: Stages | None = None

    def whole(self, mine: Manifest) -> Manifest:
        """The manifest of the whole model."""
        told = self._compare(has(self._runner.model, mine, self.observed))
        manifest, self._stages = seen_from(self.stage, told, self._runner.model)
        return manifest

    def interleaver(self, *args: Any) -> Interleaver:
        """The interleaver of this stage, of the arguments that one has."""
        assert self._stages is not None
        patience = float(envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)  # after which vLLM gives the engine up (0.32, 0.33)
        home, processes = os.environ[HOME], self._compare(os.getpid())
        wire = partial(ProcessWire, home, self.stage, processes, patience=patience)
        return Staged(*args, stages=self._stages, wire=lambda answer: wire(answer=answer))

    def enter(self, blocks: Blocks) -> None:
        """Have the blocks told when this stage's part of a forward pass is over."""
        assert isinstance(blocks, StagedBlocks)

        def entered(forward: Callable[..., Any]) -> Callable[..., Any]:
            def passing(*args: Any, **kwargs: Any) -> Any:
                output = forward(*args, **kwargs)
                blocks.pass_on()
                return output

            return passing

        around(self._runner, "_model_forward", entered)

    def agree(self, failure: str | None) -> Sequence[str | None]:
        """What went wrong on each stage, given what did on this one."""
        return self._compare(failure)

    def _compare(self, mine: Any) -> list[Any]:
        every: list[Any] = [None] * self._group.world_size
        dist.all_gather_object(every, mine, group=self._group.cpu_group)
        return every


class StagedBlocks(Blocks):
    """The blocks of one stage."""

    interleaver: Staged

    def schedule(self, scheduled: SchedulerOutput) -> None:
        if self.interleaver.behind:
            with torch.inference_mode():  # as in the steps
                self.interleaver.catch_up(self._of(scheduled.num_scheduled_tokens))
        super().schedule(scheduled)

    def begin_step(self, step: Composition) -> None:
        if self.interleaver.unsaid:  # nothing was drawn
            self.end_step()
        met = [run for run in self._of(step.requests) if run not in self.interleaver.closed] if self._runs else []
        if met:
            self.interleaver.open(met)
        super().begin_step(step)
        if met:
            self.interleaver.take_in()

    def pass_on(self) -> None:
        """This stage's part of the forward pass is over."""
        self.interleaver.pass_on()

    def end_step(self) -> None:
        if self.interleaver.stages.is_last:
            super().end_step()
            self.interleaver.speak()
            self._outbox.flush()
        elif self._going:
            self._going = False
            self.steps += 1

    def _of(self, requests: Iterable[str]) -> list[BlockRun]:
        return [run for request in requests for run in self._runs.get(request, ())]


class Unheard(NoOutbox):
    """That of a stage from which nothing goes home: what blocks save is dropped step by step."""

    def report(self, run: BlockRun) -> None:
        run.console.take()
        with suppress(Exception):
            run.saves.collect()


class Has(NamedTuple):
    """What a stage has of the model."""

    part: Part
    outlines: dict[str, Outline]


def has(model: torch.nn.Module, manifest: Manifest, cut: Cut) -> Has:
    return Has(Part(manifest, frozenset(cut.paths)), {path: outline(module) for path, module in here(model).items()})


def here(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules of this stage, under all their paths."""
    named = model.named_modules(remove_duplicate=False)
    return {path: module for path, module in named if type(module).__name__ != MISSING}


def seen_from(stage: int, told: Sequence[Has], model: torch.nn.Module) -> tuple[Manifest, Stages]:
    """The manifest of the whole model, and who has what, given what each stage has."""
    manifest, starts, cut, shared = whole([each.part for each in told])
    homes = {path: info.stage for path, info in manifest.modules.items()}
    mine = here(model)
    ours = {first: mine[path] for path, first in reversed(list(shared.items())) if path in mine}
    modules = {path: ours.get(shared.get(path, ""), mine.get(path)) for path in manifest.modules}
    elsewhere = {
        path: stand_in(path, told[homes[path]].outlines[path])
        for path, module in modules.items()
        if module is None and path in told[homes[path]].outlines
    }
    found = {path: elsewhere.get(path) if module is None else module for path, module in modules.items()}
    known = {path: module for path, module in found.items() if module is not None}
    return manifest, Stages(stage, starts, homes, cut, elsewhere, known)


def outline(module: torch.nn.Module) -> Outline:
    """What can be told of a module elsewhere."""
    tensors = (*dict(module.named_parameters(recurse=False)), *dict(module.named_buffers(recurse=False)))
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    plain = {name: value for name, value in own.items() if isinstance(value, PLAIN)}
    others = {name: type(value).__qualname__ for name, value in own.items() if name not in plain}
    return Outline(type(module), plain, tensors, others)


def stand_in(path: str, told: Outline) -> torch.nn.Module:
    """A module of that class without tensors, from which can be read what is known of it."""
    module = told.cls.__new__(told.cls)
    torch.nn.Module.__init__(module)
    others = {name: Opaque(kind) for name, kind in told.others.items() if name != "forward"}
    tensors = {name: Far(path, name) for name in told.tensors}
    vars(module).update(told.plain | others | tensors)
    return module
