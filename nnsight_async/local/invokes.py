"""Traces of several prompts, which may wait for each other."""

from __future__ import annotations

from nnsight_async.local.barrier import Barrier
from nnsight_async.runs.invokes import Invoke, InvokeTrace, InvokeTracer


class LocalInvokeTracer(InvokeTracer):
    """What `with model.trace() as tracer` gives on a local model."""

    _parties = 0

    def barrier(self, parties: int) -> Barrier:
        """Something to call in the blocks of `parties` invokes: each waits there until all have come.

        From there on they see each other's names: a value read in one can be written in another.
        """
        self._parties = max(self._parties, parties)
        return Barrier(parties)

    def close(self, error: BaseException | None) -> list[Invoke]:
        invokes = super().close(error)
        runs = sum(invoke.request.params.n for invoke in invokes)
        if error is None and runs < self._parties:
            raise ValueError(
                f"tracer.barrier({self._parties}) waits for {self._parties} invokes, and this trace has {runs}: none "
                "of them would go on"
            )
        return invokes


class LocalInvokeTrace(InvokeTrace):
    """The context manager that `model.trace()` returns on a local model."""

    def _made(self, asynchronous: bool) -> InvokeTracer:
        return LocalInvokeTracer(self._launcher, asynchronous, self._asking, carries=self._carries)
