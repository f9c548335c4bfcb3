"""Values on their way home: gathered by the model's thread, sent by another."""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING

import zmq

from nnsight_async.errors import SaveError
from nnsight_async.runs import failures, frames
from nnsight_async.runs.frames import Frame
from nnsight_async.worker.staging import Staging

if TYPE_CHECKING:
    import torch

    from nnsight_async.interleave.block import BlockRun
    from nnsight_async.interleave.saving import Entry

    Message = list[tuple[Frame, list[Entry]]]
    Parcel = tuple[Message, torch.cuda.Event | None]

log = logging.getLogger(__name__)


class Outbox:
    """Sends one message per step. The model's thread only starts copies and enqueues."""

    def __init__(self, address: str, device: torch.device) -> None:
        self._staging = Staging(device)
        self._message: Message = []
        self._queue: queue.SimpleQueue[Parcel | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send_all, args=(address,), name="nnsight-outbox", daemon=True)
        self._thread.start()

    def report(self, run: BlockRun) -> None:
        """Take what `run` has to say at the end of a step."""
        entries: list[Entry] = []
        if run.error is None:
            try:
                entries = run.saves.collect()
            except Exception as error:
                run.fail(error)
        packed = failures.pack(run.error, f"in step {max(run.step, 0)} of the run") if run.error else None
        frame = Frame(run.key, run.step, [], run.finished, run.stopped, run.ended, packed)
        self._message.append((frame, entries))

    def flush(self) -> None:
        """The step is over: let the other thread send what was taken."""
        if self._message:
            copied = self._staging.start(entry for _, entries in self._message for entry in entries)
            self._queue.put((self._message, copied))
            self._message = []

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=5)

    def _send_all(self, address: str) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(address)
        while (parcel := self._queue.get()) is not None:
            try:
                message, copied = parcel
                if copied is not None:
                    copied.synchronize()
                for parts in _encoded(message):
                    socket.send_multipart(parts, copy=False)
            except Exception:
                log.exception("a message of saved values could not be sent")
        socket.close()
        context.term()


def _encoded(message: Message) -> list[list[frames.Buffer]]:
    """The message whole, or frame by frame where one holds a value that cannot be written: its run alone fails."""
    try:
        return [frames.encode(message)]
    except Exception:
        return [_alone(frame, entries) for frame, entries in message]


def _alone(frame: Frame, entries: list[Entry]) -> list[frames.Buffer]:
    try:
        return frames.encode([(frame, entries)])
    except Exception as error:
        names = ", ".join(sorted({entry.name for entry in entries}))
        failure = SaveError(f"what was saved as {names} cannot be sent: {error}")
        frame.error = failures.pack(failure, f"in step {max(frame.step, 0)} of the run")
        return frames.encode([(frame, [])])
