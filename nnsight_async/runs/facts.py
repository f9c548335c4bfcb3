"""What logs and spans tell of a run: never a prompt, a value or a token."""

from __future__ import annotations

from traceback import walk_tb
from typing import TYPE_CHECKING, Any

from nnsight_async.errors import RunCancelledError

if TYPE_CHECKING:
    from nnsight_async.runs.run import Run


def outcome(run: Run) -> str:
    """How a run has ended: "finished", "cancelled" or "failed"."""
    if run.error is None:
        return "finished"
    return "cancelled" if isinstance(run.error, RunCancelledError) else "failed"


def facts(run: Run) -> dict[str, Any]:
    """Of a run that has ended, as the `extra` of a log record."""
    request, error = run.request, run.error
    return {
        "model": run.model,
        "run": run.key,
        "invoke": request.invoke,
        "sequence": request.sequence,
        "outcome": outcome(run),
        "step": max(run.ledger.through, len(run.tokens) - 1),
        "error": None if error is None else type(error).__name__,
        "line": None if error is None else _line(error),
    }


def _line(error: BaseException) -> str | None:
    """The last line that the traceback of a block's error leads to."""
    places = [f"{frame.f_code.co_filename}:{line}" for frame, line in walk_tb(error.__traceback__)]
    return places[-1] if places else None
