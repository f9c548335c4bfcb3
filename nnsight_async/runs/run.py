"""One request with a block, seen from the caller's side."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from threading import RLock
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from nnsight_async.errors import EngineClosedError, RunCancelledError, SlowConsumerError
from nnsight_async.runs import echo, failures
from nnsight_async.runs.deltas import Deltas, Drawn
from nnsight_async.runs.facts import facts, outcome
from nnsight_async.runs.history import Buffer, Step
from nnsight_async.runs.job import Job
from nnsight_async.runs.ledger import Ledger, lost
from nnsight_async.runs.ops import Capture
from nnsight_async.runs.token import Token
from nnsight_async.runs.unheard import Hearing

if TYPE_CHECKING:
    from nnsight_async.capture.block import Block
    from nnsight_async.runs.edit import Installed
    from nnsight_async.runs.frames import Frame
    from nnsight_async.runs.ops import Ops
    from nnsight_async.runs.request import Request
    from nnsight_async.runs.unread import Unread

log = logging.getLogger(__name__)

new_key = count(1).__next__
"""A number that no other request has, by which its frames find it."""

OWN = ("the block",)


class _Failure(NamedTuple):
    """What a block raised, and in which step; None after the last.

    The tokens of the steps before may still be on their way: under async scheduling they come after the frame. An error
    of a step that turns out to have no token (a step that vLLM ran past the end) is none.
    """

    step: int | None
    error: BaseException


class Run(Job):
    """Joins the tokens of a request with the values of its steps.

    Token `i` is let out when the frame of step `i` is there, and a value becomes visible with the token of its step.
    """

    # Of the class, because CPython (3.11) finds attributes faster in objects that have no more than 30 of their own.
    model: str = ""
    """The name of the model that it was given to."""
    error: BaseException | None = None
    traceback: TracebackType | None = None
    context: BaseException | None = None
    before_end: Callable[[], None] | None = None
    """Called before anybody is told that the run has ended."""

    def __init__(self, request: Request, block: Block | None = None, hearing: Hearing | None = None) -> None:
        captured = [op.name for op in request.ops if isinstance(op, Capture)]
        super().__init__(tuple(dict.fromkeys([*captured, *(block.names if block is not None else ())])))
        self.key = new_key()
        self.request = request
        self.block = block
        self.edits: Sequence[Installed] = ()
        self.ops: Ops = request.ops
        """Its declared operations, those of its edits included."""
        self.captures = bool(captured)
        """Whether streams are captured, by a part of the request that comes before its edits."""
        self.ledger = Ledger(OWN if block is not None else ())
        self.buffer = Buffer()
        self.values_final = False
        self.unpack = failures.unpack
        """Makes an exception of what a frame says of it: by its pickle, for one owner's processes send it."""
        self._deltas = Deltas()
        self._pending: deque[Drawn] = deque()
        self._finished = False
        self._ending = False
        """Whether more has been told than a next step: an end, a stop or an error."""
        self._failure: _Failure | None = None
        self._call: Callable[[], None] | None = None
        self._lock = RLock()
        self._hearing = hearing or Hearing()
        self._warned: list[echo.Warned] = []

    def ride(self, edits: Sequence[Installed], *, operated: bool = False) -> None:
        """The request runs these edits, before its own block. `operated`: it has operations of others besides."""
        self.edits = [edit for edit in edits if not edit.ops]
        self.ops = (*(replace(op, edit=edit.number) for edit in edits for op in edit.ops), *self.request.ops)
        captures = ["a capture"] if self.captures else []
        own = OWN if self.block is not None else ()
        ops = ["a declared operation"] if self.ops or operated else []
        adapter = ["the adapter"] if self.request.lora is not None else []
        self.ledger = Ledger([*captures, *map(str, self.edits), *own, *ops, *adapter])

    @property
    def has_blocks(self) -> bool:
        """Whether any code of ours runs in the request."""
        return self.block is not None or bool(self.edits)

    @property
    def output(self) -> Any:
        """vLLM's output: None before the first has come, and whole when the last has."""
        return self._deltas.output

    # -- fed by the engine's loop ----------------------------------------------------------------------------------

    def when_settled(self, call: Callable[[], None]) -> None:
        """Have `call` called once, from whatever thread settles the run; at once if it has been settled."""
        with self._lock:
            if not self.settled:
                self._call = call
                return
        call()

    def feed_output(self, output: Any) -> None:
        """Take one of vLLM's outputs, with the tokens that came since the last."""
        with self._lock:
            if self.settled:
                return
            self._pending += self._deltas.add(output)
            if output.finished:
                self._finished = self._ending = True
            if self._ending or len(self.steps) <= self.ledger.complete:
                self._advance()

    def feed_frame(self, frame: Frame | Unread) -> None:
        """Take what the worker sent at the end of a step."""
        with self._lock:
            if self.settled:
                return
            if frame.printed:
                echo.echo(self.key, frame.printed)
            if frame.warned:
                self._warned += frame.warned
            self.ledger.file(frame)
            if frame.stopped or frame.error is not None:
                self._ending = True
            if frame.error is not None and self._failure is None:
                error = self.unpack(frame.error, self._beginning(frame.part))
                error.add_note(f"prompt: {failures.describe(self.request.prompt)}")
                self._failure = _Failure(None if frame.ended else frame.step, error)
            if self._ending or self._pending or frame.done:
                self._advance()

    def awaited(self) -> list[tuple[int, Ledger]]:
        """Itself, by key and ledger, if vLLM has told of a step, or of the end, and the worker has not yet."""
        awaits = not self.settled and not self.ledger.done and (bool(self._pending) or self._finished)
        return [(self.key, self.ledger)] if awaits else []

    def fail(self, error: BaseException) -> None:
        """End the run with `error`, which everyone who waits for it gets."""
        with self._lock:
            if not self.settled:
                self.error, self.traceback, self.context = error, error.__traceback__, error.__context__
                if not isinstance(error, (RunCancelledError, EngineClosedError)):  # which the caller has asked for
                    self._hearing.owe(self, error)
                self._settle()

    # -- used by callers -------------------------------------------------------------------------------------------

    @property
    def values(self) -> dict[str, Any]:
        return self.ledger.values

    def warn(self) -> None:
        while self._warned:
            echo.warn(self._warned.pop(0))

    def final(self, name: str | None = None) -> bool:
        return self.values_final

    def failed(self, name: str | None = None) -> Run | None:
        return None if self.error is None else self

    def hear(self) -> None:
        self._hearing.give()

    def outcome(self) -> Any:
        self.warn()
        self.check()
        return self.output

    def unload(self) -> None:
        """Let go of what was sent, which may be large: a run may be held for its values for long."""
        if self.block is not None:
            self.block = replace(self.block, payload=b"", constants=())

    def cancel(self) -> None:
        self.fail(RunCancelledError("the run was cancelled before it had ended"))

    def runs(self) -> Iterator[Run]:
        yield self

    # -- joining ---------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        before = len(self.steps)
        while self._pending and len(self.steps) <= self.ledger.complete and not (self._ending and self._is_over()):
            self._let_out(*self._pending.popleft())
        if self._ending:
            self._conclude()
        if self.settled:
            return
        final = not self.values_final and self.ledger.done and len(self.steps) > self.ledger.through
        if final:
            self.values_final = True
        if final or len(self.steps) > before:
            self.tell()

    def _conclude(self) -> None:
        """See whether this is the end."""
        if self.settled:
            return
        if self._failure is not None and self._has_failed():
            self.fail(self._failure.error)
        elif self._is_stopped() and self.ledger.done:
            self._stop()
        elif self._finished and not self._pending and self.ledger.done:
            self._settle()
        elif self._was_aborted():
            self.fail(RunCancelledError("vLLM ended the request before its first step"))

    def _let_out(self, number: int, text: str, logprob: float | None, reason: str | None) -> None:
        index = len(self.steps)
        saves, size = self.ledger.let_out(index)
        if self.ledger.stopped_at == index:
            reason = "stop"
        request = self.request
        given: Any = saves
        token = Token(number, text, index, logprob, given, reason, request.invoke, request.sequence)
        self.take(Step(token, saves, size))
        if size and self.buffer.add(size):
            self._make_room()

    def _make_room(self) -> None:
        for step in self.buffer.excess(self.steps):
            if self.buffer.slow_consumers == "fail" and not step.read and self.is_streamed():
                self.fail(SlowConsumerError(self.buffer.reason))
                break
            self.buffer.drop(step)

    def _beginning(self, part: int) -> failures.Place | None:
        """The line of the block's `with` or `def`."""
        edit = part - self.captures
        block = self.edits[edit].block if 0 <= edit < len(self.edits) else self.block
        return None if block is None or not block.first_line else (block.filename, block.first_line, block.function)

    def _was_aborted(self) -> bool:
        """Whether somebody else ended the request before the worker had seen it: no frame will come."""
        aborted = self.output is not None and self.output.outputs[0].finish_reason == "abort"
        return aborted and not self.steps and not self._pending and self.ledger.through < 0

    def _is_over(self) -> bool:
        """Whether no token is let out any more: the block stopped the request, or failed in the next step."""
        return self.settled or self._is_stopped() or self._has_failed()

    def _has_failed(self) -> bool:
        if self._failure is None:
            return False
        complete = self._finished and not self._pending
        if self._failure.step is None:
            return complete
        return len(self.steps) >= self._failure.step and not (complete and len(self.steps) == self._failure.step)

    def _is_stopped(self) -> bool:
        stopped = self.ledger.stopped_at
        return stopped is not None and len(self.steps) > stopped

    def _stop(self) -> None:
        """The block asked for the end: drop what vLLM drew after that step."""
        self._pending.clear()
        self._deltas.cut(self.tokens)
        self._settle()

    def _settle(self) -> None:
        self._ending = True
        self._close_ledger()
        if self.before_end is not None:
            self.before_end()
        if log.isEnabledFor(logging.DEBUG):
            log.debug("run %d %s", self.key, outcome(self), extra=facts(self))
        self.values_final = True
        echo.forget(self.key)
        if self._call is not None:
            self._call()
        self._call = None
        self.end()

    def _close_ledger(self) -> None:
        """Who waits is told that the run has ended, though its last values cannot be made: there may be no memory."""
        try:
            if self.error is None and (saves := self.ledger.close()):
                self.take(Step(None, saves))
            if self.output is not None:
                self.output.saves = self.ledger.values
        except Exception as error:
            if self.error is None:
                self.error = lost(len(self.steps), repr(error))
                self._hearing.owe(self, self.error)
