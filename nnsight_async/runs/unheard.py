"""Errors that nobody has asked for are logged, as asyncio does with those of futures."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any
from weakref import finalize

from nnsight_async.runs.facts import facts

if TYPE_CHECKING:
    from nnsight_async.runs.run import Run

log = logging.getLogger(__name__)


class Hearing:
    """Whether somebody was told why a prompt failed; its sequences have one in common."""

    def __init__(self) -> None:
        self._owed: list[finalize[..., Run]] = []
        self._given = False

    def owe(self, run: Run, error: BaseException) -> None:
        """`run` has failed: if it is dropped, or the program ends, before `give`, the error is logged."""
        if not self._given:
            self._owed.append(finalize(run, self._log, error, facts(run)))

    def give(self) -> None:
        """The caller is told now."""
        self._given = True
        while self._owed:  # an error that was raised knows the frames it passed, and they know the run
            self._owed.pop().detach()

    def _log(self, error: BaseException, told: dict[str, Any]) -> None:
        if not self._given:
            self._given = True
            said = "a run failed, and nothing asked for its saves, its result or its tokens:"
            log.error(said, exc_info=error, extra=told)
