"""Values on their way home: gathered by the model's thread, sent by another."""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING, Any

from nnsight_async.errors import SaveError
from nnsight_async.runs import failures, frames
from nnsight_async.runs.frames import MARK, Frame, Message, Together
from nnsight_async.runs.packing import Tensors, pack
from nnsight_async.runs.reporting import report
from nnsight_async.worker.sender import Sender
from nnsight_async.worker.staging import Staging

if TYPE_CHECKING:
    import torch

    from nnsight_async.interleave.block import BlockRun
    from nnsight_async.interleave.crews import Crew

    Parcel = tuple[Message, list[torch.Tensor], torch.cuda.Event | None]

log = logging.getLogger(__name__)


class Outbox:
    """Sends one message per step. The model's thread only gathers and enqueues."""

    def __init__(self, address: str, device: torch.device) -> None:
        self._address = address
        self._staging = Staging(device)
        self._frames: list[Frame] = []
        self._together: list[Together] = []
        self._tensors = Tensors()
        self._queue: queue.SimpleQueue[Parcel | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send_all, name="nnsight-outbox", daemon=True)
        self._thread.start()

    def report(self, run: BlockRun) -> None:
        """Take what `run` has to say at the end of a step."""
        self._frames.append(report(run, self._packed))

    def report_together(self, crew: Crew) -> None:
        """Take what the runs of a crew have to say at the end of a step."""
        found = Together(crew.keys, crew.bases, crew.numbers, crew.steps, [], crew.each)
        try:
            found.entries = [self._packed(*entry, together=True) for entry in crew.entries()]
        except SaveError as error:
            self._frames += _without_values(Message([], [], together=[found]), error).frames
        else:
            self._together.append(found)

    def say(self, key: int, part: int, error: Exception | None, number: int = 0) -> None:
        """Tell the run that a part of it that is no block has done what it had to, or that it failed.

        `number` counts what is said of that part: what has been done may fail later.
        """
        when = "when an edit was cleared" if number else "before step 0 of the run"
        failure = None if error is None else failures.pack(error, when)
        self._frames.append(Frame(key, 0, done=True, error=failure, part=part, number=number))

    def flush(self) -> None:
        """The step is over: let the other thread send what was taken."""
        if not self._frames and not self._together:
            return
        message = Message(self._tensors.kinds, self._frames, self._address, self._together)
        try:
            flats = self._tensors.join()
            made = self._staging.mark()
        except Exception as error:  # out of memory: these runs end, the engine goes on
            message, flats, made = _without_values(message, error), [], None
        self._frames, self._together, self._tensors = [], [], Tensors()
        self._queue.put((message, flats, made))

    def mark(self, address: str, number: int) -> None:
        """Send a mark behind all that was reported; from now on, send to `address`."""
        self._address = address
        self._queue.put((Message([], [Frame(MARK, number)], address), [], None))

    def _packed(self, name: str, operation: str, value: Any, *, together: bool = False) -> frames.Entry:
        try:
            return name, operation, pack(value, self._tensors, together=together)
        except Exception as error:
            raise SaveError(f"what was saved as {name!r} cannot be sent: {error}") from None

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=5)

    def _encoded(
        self, message: Message, flats: list[torch.Tensor], made: torch.cuda.Event | None
    ) -> list[frames.Buffer]:
        try:
            return frames.encode(message, self._staging.fetch(flats, made))
        except Exception as error:
            return frames.encode(_without_values(message, error), [])

    def _send_all(self) -> None:
        sender = Sender()
        while (parcel := self._queue.get()) is not None:
            try:
                sender.send(parcel[0].address, self._encoded(*parcel))
            except Exception:  # the client will miss it
                log.exception("a message of saved values could not be sent")
        sender.close()


class NoOutbox(Outbox):
    """That of a rank on which no block runs: it has nothing to say."""

    def __init__(self, address: str, device: torch.device) -> None:
        pass

    def report(self, run: BlockRun) -> None:
        pass

    def report_together(self, crew: Crew) -> None:
        pass

    def say(self, key: int, part: int, error: Exception | None, number: int = 0) -> None:
        pass

    def flush(self) -> None:
        pass

    def mark(self, address: str, number: int) -> None:
        pass

    def close(self) -> None:
        pass


def _without_values(message: Message, error: Exception) -> Message:
    failure = SaveError(f"what was saved in this step cannot be sent: {error}")
    found = message.every
    for frame in found:
        frame.entries, frame.done = [], True
        frame.error = frame.error or failures.pack(failure, f"in step {max(frame.step, 0)} of the run")
    return Message([], found, message.address)
