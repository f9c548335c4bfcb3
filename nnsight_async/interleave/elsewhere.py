"""Modules as blocks use them that run on every stage of a pipeline, and so on stages that have not the module."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

from nnsight_async.errors import UnsupportedError
from nnsight_async.interleave.block import BlockRun
from nnsight_async.interleave.context import running
from nnsight_async.interleave.interleaver import Interleaver
from nnsight_async.interleave.leading import is_of_model
from nnsight_async.interleave.locations import expression
from nnsight_async.interleave.passed import (
    Apply,
    Called,
    Entry,
    Failed,
    Far,
    Fetch,
    Module,
    Stages,
    Wire,
    diverged,
    portable,
)
from nnsight_async.interleave.shared import applicable, guarded, reference


class Reaching(Interleaver):
    """Has a module applied once, by the stage that leads the block, on the stage that has it; the others are told."""

    def __init__(self, *args: Any, stages: Stages, wire: Callable[[Callable[[Any], Any]], Wire], **kwargs: Any) -> None:
        self.stages = stages
        super().__init__(*args, **kwargs)
        self.sites.lodge(stages.modules)
        self._leads = False
        """Whether the block that has its turn is at a location of this stage, or behind one."""
        self._noted: dict[BlockRun, list[Entry]] = {}
        """What the others are to be told of."""
        self._coming: dict[BlockRun, deque[Entry]] = {}
        """What was told here, and not been come to yet."""
        self._wire = wire(self.answer)

    def lend(self, path: str, name: str, value: Any) -> Any:
        if isinstance(value, Far):
            return guarded(self._ask(path, Fetch(path, name)), name, expression(path))
        lent = super().lend(path, name, value)
        if is_of_model(value, self.module(path), name):
            return partial(self._applied, path, name)
        if path in self.stages.elsewhere and isinstance(value, MethodType):
            raise UnsupportedError(
                f"{expression(path)} is on stage {self.stages.homes[path]} of the pipeline, and its {name}() cannot be "
                f"called from all of them: name the tensors, such as {expression(path)}.weight"
            )
        return lent

    def call(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._applied(path, "forward", *args, **kwargs)

    def _applied(self, path: str, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """What a module returns, on the stage that leads; on the others, what it has returned there."""
        run = running()
        if not isinstance(run, BlockRun):
            raise UnsupportedError(f"{expression(path)} can be applied in the block itself only")
        if not self._leads:
            return self._applied_elsewhere(run, path, method)
        asked = Apply(path, method, *_sent(args, kwargs))
        try:
            value = self._ask(path, asked) if path in self.stages.elsewhere else self.answer(asked)
        except Exception as error:
            self._note(run, Called(path, method, Failed.of(error)))
            raise
        self._note(run, Called(path, method, portable(value)))
        return value

    def _applied_elsewhere(self, run: BlockRun, path: str, method: str) -> Any:
        match next(iter(self._coming.get(run, ())), None):
            case Called(called, by, value) if (called, by) == (path, method):
                self._coming[run].popleft()
                if isinstance(value, Failed):
                    raise value.error
                return value
            case _:
                raise diverged(run)

    def _ask(self, path: str, question: Apply | Fetch) -> Any:
        with self.watchdog.held():
            return self._wire.ask(self.stages.homes[path], question)

    def answer(self, question: Apply | Fetch) -> Any:
        """What another stage asks for, in a thread of its own; what a block of this one asks for, in the model's."""
        module = self.module(question.path)
        if isinstance(question, Fetch):
            return getattr(module, question.name).detach()
        args = tuple(map(self._here, question.args))
        kwargs = {name: self._here(value) for name, value in question.kwargs.items()}
        if question.method == "forward":
            return applicable(module, question.path)(*args, **kwargs)
        return getattr(module, question.method)(*args, **kwargs)

    def _here(self, value: Any) -> Any:
        if not isinstance(value, Module):
            return value
        if value.path in self.stages.elsewhere:
            raise UnsupportedError(
                f"{expression(value.path)} is on stage {self.stages.homes[value.path]} of the pipeline, and what it is "
                f"given to is on stage {self.stages.stage}: modules can be given to those of their own stage"
            )
        return self.module(value.path)

    def _note(self, run: BlockRun, entry: Entry) -> None:
        self._noted.setdefault(run, []).append(entry)


def _sent(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments as they go to another stage."""

    def sent(value: Any) -> Any:
        path = reference(value)
        return value if path is None else Module(path)

    return tuple(map(sent, args)), {name: sent(value) for name, value in kwargs.items()}
