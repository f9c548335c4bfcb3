"""Blocks on the first rank of a tensor-parallel group, where the others are told what becomes of their values."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch

from nnsight_async.interleave.applied import announced, apply, check, refuse
from nnsight_async.interleave.block import BlockRun
from nnsight_async.interleave.interleaver import Interleaver
from nnsight_async.interleave.layouts import Layouts
from nnsight_async.interleave.locations import Location
from nnsight_async.interleave.randomness import Randomness
from nnsight_async.interleave.ranks import Announced, Change, Kind, Ranks, State, Turn, Write, gathered, written
from nnsight_async.interleave.rows import Batch, Path, Slab, Span, Written, part
from nnsight_async.interleave.shared import applicable, reference
from nnsight_async.interleave.together import joined
from nnsight_async.interleave.waiting import Waiting


class Leading(Interleaver):
    """Runs the blocks. They see whole values, and what they write is sent to the others, who take their parts of it.

    Each entry from the worker is one exchange with the others, who enter at the same places (`Following`): at its end
    they hear one `Turn`, and before that an `Apply` for each module that a block applied. So nothing that a block does,
    draws or raises here can have the others wait for what does not come.
    """

    plans = False

    def __init__(self, *args: Any, ranks: Ranks, layouts: Layouts, device: torch.device, **kwargs: Any) -> None:
        self._heard = _Heard()
        super().__init__(*args, **kwargs)
        self._ranks = ranks
        self._layouts = layouts
        self._randomness = Randomness(device)
        self._writes: list[Write] = []
        self._told: dict[BlockRun, State] = {}

    # -- driven by the worker --------------------------------------------------------------------------------------

    def arrive(self, runs: Iterable[BlockRun]) -> None:
        with self._exchange(runs):
            pass

    def begin_step(self, spans: Mapping[BlockRun, Span], batch: Batch, *, stacked: bool = False) -> None:
        if self._present:
            self.end_step()
        with self._exchange(spans):
            super().begin_step(spans, batch, stacked=stacked)

    def fire(self, event: Location, value: Any) -> Any:
        if self.running:
            return value
        place = self._layouts.at(event)
        whole = gathered(value, place, self._ranks)
        runs = [*self.waiting.get(event, ()), *(run for run, _ in self._collecting.get(event, ()))]
        with self._exchange(runs):
            after = super().fire(event, whole)
        if not place:
            return after
        return written(value, event, self._batch, self._writes, place, self._ranks)

    def end_step(self) -> None:
        with self._exchange(self._present):
            super().end_step()

    def end(self, run: BlockRun) -> None:
        with self._exchange((run,)):
            super().end(run)
        self._told.pop(run, None)

    def dismiss(self, run: BlockRun) -> None:
        with self._exchange((run,)):
            super().dismiss(run)

    @contextmanager
    def apart(self) -> Generator[None]:
        self._randomness.swap()
        self._ranks.part()
        try:
            yield
        finally:
            self._ranks.meet()
            self._randomness.swap()

    @contextmanager
    def _exchange(self, runs: Iterable[BlockRun] = ()) -> Generator[None]:
        """Let blocks have their turns, and tell the others; `runs` are those that may change."""
        runs = list(runs)
        self._writes = []
        with self.apart():
            yield
        self.exchanges += 1
        writes = [Announced(path, start, Kind.of(rows), within) for path, start, rows, within in self._writes]
        self._ranks.tell(Turn(self._heard.take(), self._news(runs), writes))
        for write in self._writes:
            self._ranks.send(write.rows)

    def _news(self, runs: Iterable[BlockRun]) -> list[State]:
        news: list[State] = []
        for run in runs:
            state = State(run.key, run.part, run.over, self.log.holds(run), run.stopped, run.wrote)
            if self._told.get(run) != state:
                self._told[run] = state
                news.append(state)
        return news

    # -- asked by blocks -------------------------------------------------------------------------------------------

    def check(self, event: Location) -> None:
        super().check(event)
        refuse(self._layouts, event)

    def events_of(self, modules: Iterable[Any] | None, include_inputs: bool) -> list[Location]:
        events = super().events_of(modules, include_inputs)
        if modules is None:
            return [event for event in events if self._layouts.known(event)]
        for event in events:
            self.check(event)
        return events

    def lend(self, path: str, name: str, value: Any) -> Any:
        lent = super().lend(path, name, value)
        return partial(self._together, path, name) if is_of_model(lent, self.module(path), name) else lent

    def call(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._together(path, "forward", *args, **kwargs)

    def _together(self, path: str, method: str, /, *args: Any, **kwargs: Any) -> Any:
        module = self.module(path)
        if method == "forward":
            applicable(module, path)
            check(self._layouts, path)
        asked, tensors = announced(path, method, (args, kwargs), reference)
        real = tuple(map(self._real, args)), {name: self._real(value) for name, value in kwargs.items()}
        with self.watchdog.held():
            self._ranks.meet()
            try:
                self._ranks.tell(asked)
                for tensor in tensors:
                    self._ranks.send(tensor)
                return apply(module, asked, real, self._layouts, self._ranks)
            finally:
                self._ranks.part()

    # -- the turns -------------------------------------------------------------------------------------------------

    def _make_waiting(self) -> Waiting:
        return self._heard

    def _slab(self, value: Any, event: Location, runs: Iterable[BlockRun], *, before: Slab | None = None) -> Slab:
        spans = [self._spans[run] for run in runs]
        return _Noted(value, self._batch, event, spans, before=before, notes=self._writes)


class _Heard(Waiting):
    """Remembers what is to be told of it."""

    def __init__(self) -> None:
        super().__init__()
        self._changes: list[tuple[Change, Location]] = []

    def take(self) -> list[tuple[Change, Location]]:
        """What has changed since it was taken last."""
        changes, self._changes = self._changes, []
        return changes

    def _enter(self, event: Location) -> None:
        self._changes.append(("want", event))
        super()._enter(event)

    def _release(self, event: Location) -> None:
        self._changes.append(("drop", event))
        super()._release(event)

    def _watch(self, event: Location) -> None:
        self._changes.append(("watch", event))
        super()._watch(event)

    def _rest(self, event: Location) -> None:
        self._changes.append(("rest", event))
        super()._rest(event)


class _Noted(Slab):
    """Notes what is written, in the order in which it has to be written elsewhere."""

    def __init__(self, *args: Any, notes: list[Write], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._notes = notes

    def put(self, start: int, written: Written, *, in_place: bool = False) -> None:
        if in_place:
            self._notes += [Write(path, start, rows, True) for path, rows in written]
        super().put(start, written, in_place=in_place)

    def finish(self) -> Any:
        notes = [
            Write(path, start, rows, False)
            for path, writes in self._writes.items()
            for start, rows in (joined(writes) if self._by_rows(path) else writes[-1:])
        ]
        value = super().finish()
        self._notes += notes
        return value

    def _by_rows(self, path: Path) -> bool:
        return not self._whole(part(self.value, path))


def is_of_model(value: Any, module: torch.nn.Module, name: str) -> bool:
    """Whether an attribute is a method that the model has beyond those of torch, and that may need all ranks."""
    if isinstance(value, MethodType):
        return value.__self__ is module and (value.__func__.__module__ or "").partition(".")[0] != "torch"
    return isinstance(value, FunctionType) and name in vars(module)
