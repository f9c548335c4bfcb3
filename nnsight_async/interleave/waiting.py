"""Which blocks wait where, and the modules that report because of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nnsight_async.interleave.locations import Location

if TYPE_CHECKING:
    from nnsight_async.interleave.block import BlockRun
    from nnsight_async.interleave.sites import Sites


class Waiting(dict[Location, "list[BlockRun]"]):
    """Runs by the event that they wait for. An event without a run is one that is wanted for another reason."""

    sites: Sites

    def enlist(self, run: BlockRun) -> None:
        """`run` waits where it says, if it does."""
        event = run.waits
        if isinstance(event, Location) and not run.finished:
            runs = self.get(event)
            if runs is None:
                self[event] = [run]
                self._enter(event)
            else:
                runs.append(run)
            if run.looks_inside:
                self._watch(event)

    def leave(self, event: Location) -> list[BlockRun]:
        """The runs that wait for `event`, which has come: they do no more."""
        runs = self.pop(event)
        for run in runs:
            if run.looks_inside:
                self._rest(event)
        self._release(event)
        return runs

    def want(self, event: Location) -> list[BlockRun]:
        """Have `event` reported; returns the runs that wait for it."""
        runs = self.get(event)
        if runs is None:
            runs = self[event] = []
            self._enter(event)
        return runs

    def forget(self, run: BlockRun) -> None:
        """`run` waits no more."""
        if isinstance(run.waits, Location) and run in self.get(run.waits, ()):
            self[run.waits].remove(run)
            if run.looks_inside:
                self._rest(run.waits)
            self.drop(run.waits)

    def drop(self, event: Location) -> None:
        """`event` is not wanted any more, unless some run waits for it."""
        if not self.get(event, True):
            del self[event]
            self._release(event)

    def _enter(self, event: Location) -> None:
        self.sites.want(event)

    def _release(self, event: Location) -> None:
        self.sites.release(event)

    def _watch(self, event: Location) -> None:
        self.sites.watch(event)

    def _rest(self, event: Location) -> None:
        self.sites.rest(event)
