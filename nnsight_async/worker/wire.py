"""Messages between the stages of a pipeline, which are processes of one machine."""

from __future__ import annotations

import io
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import psutil
import torch
import zmq

from nnsight_async.errors import StageError
from nnsight_async.interleave.passed import Failed

SLICE = 500
"""Milliseconds between two looks whether the other stage still lives."""

Frames = Sequence[bytes | memoryview]


class ProcessWire:
    """Sockets in the engine's folder: one on which a stage hears, and one on which it is asked, in a thread."""

    def __init__(
        self, home: str, stage: int, processes: Sequence[int], answer: Callable[[Any], Any], patience: float
    ) -> None:
        """`processes` are the ids of those of all stages; one that lives is waited for `patience` seconds."""
        self._home, self._stage, self._processes = home, stage, processes
        self._answer = answer
        self._patience = patience
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._in = self._context.socket(zmq.PULL)
        self._in.setsockopt(zmq.RCVHWM, 0)
        self._in.bind(_address(home, "stage", stage))
        self._out = {other: self._connected(zmq.PUSH, "stage", other) for other in self._others}
        self._asked: dict[int, zmq.Socket[bytes]] = {}
        self._arrived: dict[int, deque[Any]] = {other: deque() for other in self._others}
        threading.Thread(target=self._serve, name="nnsight-stage", daemon=True).start()

    @property
    def _others(self) -> list[int]:
        return [stage for stage in range(len(self._processes)) if stage != self._stage]

    def say(self, message: object, stages: Iterable[int]) -> None:
        frames = packed((self._stage, message))
        for stage in stages:
            self._out[stage].send_multipart(frames)

    def hear(self, stage: int) -> Any:
        arrived = self._arrived[stage]
        if not arrived:
            self._await(self._in, stage, lambda: self._take_in() or not arrived)
        return arrived.popleft()

    def heard(self, stage: int) -> bool:
        self._take_in()
        return bool(self._arrived[stage])

    def ask(self, stage: int, question: object) -> Any:
        socket = self._asked.get(stage)
        if socket is None:
            socket = self._asked[stage] = self._connected(zmq.REQ, "asked", stage)
        try:
            socket.send_multipart(packed(question))
            self._await(socket, stage, lambda: not socket.poll(0))
        except StageError:
            self._asked.pop(stage).close(linger=0)
            raise
        answer = unpacked(socket.recv_multipart())
        if isinstance(answer, Failed):
            raise answer.error
        return answer

    def _connected(self, kind: int, name: str, stage: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.connect(_address(self._home, name, stage))
        return socket

    def _take_in(self) -> None:
        while self._in.poll(0):
            stage, message = unpacked(self._in.recv_multipart())
            self._arrived[stage].append(message)

    def _await(self, socket: zmq.Socket[bytes], stage: int, missing: Callable[[], bool]) -> None:
        until = time.monotonic() + self._patience
        while missing():
            if socket.poll(SLICE) or not missing():
                continue
            if not _lives(self._processes[stage]):
                raise StageError(f"stage {stage} of the pipeline has ended, and stage {self._stage} waits for it")
            if time.monotonic() > until:
                raise StageError(
                    f"stage {stage} of the pipeline has said nothing for {self._patience:.0f} seconds, and stage "
                    f"{self._stage} waits for it"
                )

    def _serve(self) -> None:
        socket = self._context.socket(zmq.REP)
        socket.bind(_address(self._home, "asked", self._stage))
        while True:
            question = socket.recv_multipart()
            try:
                with torch.inference_mode():
                    answer = packed(self._answer(unpacked(question)))
            except Exception as error:
                answer = packed(Failed.of(error))
            socket.send_multipart(answer)


def _address(home: str, name: str, stage: int) -> str:
    return f"ipc://{home}/{name}-{stage}"


def _lives(process: int) -> bool:
    try:
        return psutil.Process(process).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


# -- as bytes ----------------------------------------------------------------------------------------------------------


class _Packer(pickle.Pickler):
    """Leaves the bytes of tensors outside."""

    def reducer_override(self, value: Any, /) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        plain = value.detach().as_subclass(torch.Tensor).cpu().contiguous()
        data: Any = plain.reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(data), plain.dtype, plain.shape)


def packed(value: Any) -> list[bytes | memoryview]:
    """A value of tensors and plain data as frames. Only processes of one engine read them."""
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    _Packer(file, protocol=5, buffer_callback=buffers.append).dump(value)
    return [file.getvalue(), *(buffer.raw() for buffer in buffers)]


def unpacked(frames: Frames) -> Any:
    """What `packed` was given; the tensors are copies."""
    return pickle.loads(frames[0], buffers=map(bytearray, frames[1:]))


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not len(buffer):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).reshape(shape)
