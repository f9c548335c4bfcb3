"""What a run has to say at the end of a step, where its block runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnsight_async.runs import failures
from nnsight_async.runs.frames import Frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from nnsight_async.interleave.block import BlockRun
    from nnsight_async.runs.frames import Entry

    Pack = Callable[[str, str, Any], Entry]


def report(run: BlockRun, pack: Pack) -> Frame:
    """The next frame of `run`, with its entries as `pack` makes them. What cannot be packed ends the run."""
    entries: list[Entry] = []
    spent = run.saves.spent
    if run.error is None:
        try:
            entries = [pack(entry.name, entry.operation, entry.value) for entry in run.saves.collect()]
        except Exception as error:
            run.fail(error)
    failure = None
    if run.error is not None:
        failure, entries = failures.pack(run.error, f"in step {max(run.step, 0)} of the run", run.stood), []
    printed, warned = run.console.take()
    frame = Frame(run.key, run.step, entries, run.over, run.stopped, run.ended, failure, printed, warned)
    frame.size, frame.part, frame.number = run.saves.spent - spent, run.part, run.reports
    run.reports += 1
    return frame
