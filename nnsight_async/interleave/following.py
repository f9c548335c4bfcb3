"""The other ranks of a tensor-parallel group, where no block runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from nnsight_async.interleave.applied import apply, unpacked
from nnsight_async.interleave.block import BlockRun
from nnsight_async.interleave.interleaver import Interleaver
from nnsight_async.interleave.layouts import Layouts
from nnsight_async.interleave.locations import Location
from nnsight_async.interleave.ranks import Apply, Ranks, State, Turn, Write, gathered, written
from nnsight_async.interleave.rows import Batch, Span


class Following(Interleaver):
    """Does what it hears from `Leading`: gives its parts of values, takes its parts of what is written.

    Its runs have no program. They stand where those of the first rank do, as far as this rank has to know.
    """

    def __init__(self, *args: Any, ranks: Ranks, layouts: Layouts, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ranks = ranks
        self._layouts = layouts
        self._runs: dict[tuple[int, int], BlockRun] = {}
        self._remembered: set[BlockRun] = set()

    def arrive(self, runs: Iterable[BlockRun]) -> None:
        self._runs.update({(run.key, run.part): run for run in runs})
        self._follow()

    def begin_step(self, spans: Mapping[BlockRun, Span], batch: Batch, *, stacked: bool = False) -> None:
        if self._present:
            self.end_step()
        self._batch = batch
        for run, span in spans.items():
            if span.rows and not run.over:
                run.position = span.position + span.replayed + span.rows
                self._present.append(run)
        self._follow()

    def begin_sampling(self, spans: Mapping[BlockRun, Span], batch: Batch) -> None:
        self._batch = batch

    def fire(self, event: Location, value: Any) -> Any:
        if self.running:
            return value
        place = self._layouts.at(event)
        gathered(value, place, self._ranks)
        return written(value, event, self._batch, self._follow(), place, self._ranks)

    def end_step(self) -> None:
        self._present = []
        self._follow()

    def end(self, run: BlockRun) -> None:
        self._follow()
        run.dismiss()
        self._remembered.discard(run)
        self._runs.pop((run.key, run.part), None)

    def dismiss(self, run: BlockRun) -> None:
        run.dismiss()
        self._follow()

    def remembers(self, run: BlockRun) -> bool:
        return run in self._remembered

    def _follow(self) -> list[Write]:
        """Listen until blocks have had their turns; returns what they have written."""
        while isinstance(heard := self._ranks.hear(), Apply):
            self._apply(heard)
        assert isinstance(heard, Turn)
        changes = {
            "want": self.waiting.want,
            "drop": self.waiting.drop,
            "watch": self.sites.watch,
            "rest": self.sites.rest,
        }
        for change, event in heard.waits:
            changes[change](event)
        for state in heard.states:
            self._stand(state)
        return [Write(path, start, self._ranks.receive(kind), in_place) for path, start, kind, in_place in heard.writes]

    def _stand(self, state: State) -> None:
        run = self._runs.get((state.key, state.part))
        if run is None:
            return
        run.finished = run.ended = run.ended or state.over
        run.stopped, run.wrote = state.stopped, state.wrote
        if state.remembered:
            self._remembered.add(run)

    def _apply(self, asked: Apply) -> None:
        tensors = [self._ranks.receive(kind) for kind in asked.tensors]
        module = self.module(asked.path)
        self.running = True
        try:
            with suppress(BaseException):  # the first rank raises it in the block
                apply(module, asked, unpacked(asked.arguments, tensors, self.module), self._layouts, self._ranks)
        finally:
            self.running = False
