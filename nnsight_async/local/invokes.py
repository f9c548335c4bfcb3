"""Traces of several prompts, which may wait for each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nnsight_async.local.barrier import Barrier
from nnsight_async.runs.invokes import InvokeTrace, InvokeTracer

if TYPE_CHECKING:
    from nnsight_async.runs.handle import Launcher
    from nnsight_async.runs.invokes import Asking


class LocalInvokeTracer(InvokeTracer):
    """What `with model.trace() as tracer` gives on a local model."""

    def barrier(self, parties: int) -> Barrier:
        """Something to call in the blocks of `parties` invokes: each waits there until all have come.

        From there on they see each other's names: a value read in one can be written in another.
        """
        return Barrier(parties)


class LocalInvokeTrace(InvokeTrace):
    """The context manager that `model.trace()` returns on a local model."""

    def _made(self, launcher: Launcher, asynchronous: bool, asking: Asking) -> InvokeTracer:
        return LocalInvokeTracer(launcher, asynchronous, asking)
