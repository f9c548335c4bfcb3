"""Values on their way home: gathered by the model's thread, sent by another."""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING, Any

from nnsight_async.errors import SaveError
from nnsight_async.runs import failures, frames
from nnsight_async.runs.frames import MARK, Frame, Message
from nnsight_async.runs.packing import Tensors, pack
from nnsight_async.runs.reporting import report
from nnsight_async.worker.sender import Sender
from nnsight_async.worker.staging import Staging

if TYPE_CHECKING:
    import torch

    from nnsight_async.interleave.block import BlockRun
    from nnsight_async.interleave.saving import Entry

    Parcel = tuple[Message, list[torch.Tensor], torch.cuda.Event | None]

log = logging.getLogger(__name__)


class Outbox:
    """Sends one message per step. The model's thread only starts copies and enqueues."""

    def __init__(self, address: str, device: torch.device) -> None:
        self._address = address
        self._staging = Staging(device)
        self._frames: list[Frame] = []
        self._tensors = Tensors()
        self._queue: queue.SimpleQueue[Parcel | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send_all, name="nnsight-outbox", daemon=True)
        self._thread.start()

    def report(self, run: BlockRun) -> None:
        """Take what `run` has to say at the end of a step."""
        self._frames.append(report(run, self._packed))

    def say(self, key: int, part: int, error: Exception | None) -> None:
        """Tell the run that a part of it that is no block has done what it had to, or that it failed."""
        failure = None if error is None else failures.pack(error, "before step 0 of the run")
        self._frames.append(Frame(key, 0, done=True, error=failure, part=part))

    def flush(self) -> None:
        """The step is over: let the other thread send what was taken."""
        if not self._frames:
            return
        message = Message(self._tensors.kinds, self._frames, self._address)
        try:
            flats, copied = self._staging.start(self._tensors.join())
        except Exception as error:  # out of memory: these runs end, the engine goes on
            message, flats, copied = _without_values(message, error), [], None
        self._frames, self._tensors = [], Tensors()
        self._queue.put((message, flats, copied))

    def mark(self, address: str, number: int) -> None:
        """Send a mark behind all that was reported; from now on, send to `address`."""
        self._address = address
        self._queue.put((Message([], [Frame(MARK, number)], address), [], None))

    def _packed(self, entry: Entry) -> tuple[str, str, Any]:
        try:
            return entry.name, entry.operation, pack(entry.value, self._tensors)
        except Exception as error:
            raise SaveError(f"what was saved as {entry.name!r} cannot be sent: {error}") from None

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=5)

    def _send_all(self) -> None:
        sender = Sender()
        while (parcel := self._queue.get()) is not None:
            try:
                sender.send(parcel[0].address, _encoded(*parcel))
            except Exception:  # the client will miss it
                log.exception("a message of saved values could not be sent")
        sender.close()


class NoOutbox(Outbox):
    """That of a rank on which no block runs: it has nothing to say."""

    def __init__(self, address: str, device: torch.device) -> None:
        pass

    def report(self, run: BlockRun) -> None:
        pass

    def say(self, key: int, part: int, error: Exception | None) -> None:
        pass

    def flush(self) -> None:
        pass

    def mark(self, address: str, number: int) -> None:
        pass

    def close(self) -> None:
        pass


def _encoded(message: Message, flats: list[torch.Tensor], copied: torch.cuda.Event | None) -> list[frames.Buffer]:
    try:
        if copied is not None:
            copied.synchronize()
        return frames.encode(message, flats)
    except Exception as error:
        return frames.encode(_without_values(message, error), [])


def _without_values(message: Message, error: Exception) -> Message:
    failure = SaveError(f"what was saved in this step cannot be sent: {error}")
    for frame in message.frames:
        frame.entries, frame.done = [], True
        frame.error = frame.error or failures.pack(failure, f"in step {max(frame.step, 0)} of the run")
    return Message([], message.frames, message.address)
