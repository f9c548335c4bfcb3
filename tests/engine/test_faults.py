"""What is broken between worker and client is an error of the runs that miss something, and of no others."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
import zmq
from vllm import SamplingParams
from vllm.v1.engine.exceptions import EngineGenerateError

from nnsight_async import VLLM, EngineStartError, ValuesLostError
from nnsight_async.engine import engine as engine_module
from nnsight_async.runs import frames
from nnsight_async.runs.frames import Frame, Message
from nnsight_async.testing.engine import drained, tiny_engine_args
from nnsight_async.testing.oracle import generation
from tests.conftest import LONG
from tests.engine.rest import at_rest

PROMPT = [5, 17, 101]
STEPS = 12
SAMPLING: dict[str, Any] = {"max_tokens": STEPS, "ignore_eos": True, "temperature": 0.0}
WITHIN = 120.0  # seconds

pytestmark = pytest.mark.usefixtures("unhurried")


def every_logits(model: Any, tracer: Any) -> None:
    for _ in tracer.iter[:]:
        tracer.save(model.logits[0], "logits")


def until(told: Path) -> Any:
    """The same, to an end that the test asks for when it has broken something on the way."""

    def every_logits(model: Any, tracer: Any) -> None:
        import time

        for _ in tracer.iter[:]:
            time.sleep(0.02)  # what comes meanwhile is compared
            tracer.save(model.logits[0], "logits")
            if told.exists():
                tracer.stop()

    return every_logits


def holding(told: Path) -> Any:
    """The same, to the end of its tokens; in step 1 it waits, and the engine with it."""

    def every_logits(model: Any, tracer: Any) -> None:
        import time

        for step in tracer.iter[:]:
            while step == 1 and not told.exists():
                time.sleep(0.01)
            tracer.save(model.logits[0], "logits")

    return every_logits


def closing_the_socket(told: Path) -> Any:
    """In step 4, when the test knows that what was sent before is there."""

    def closes(model: Any, tracer: Any) -> None:
        import sys
        import threading
        import time

        for step in tracer.iter[:]:
            if step == 4:
                while not told.exists():
                    time.sleep(0.01)
                (outbox,) = (thread for thread in threading.enumerate() if thread.name == "nnsight-outbox")
                sys._current_frames()[outbox.ident].f_locals["sender"]._socket.close()
            tracer.save(model.logits[0], "logits")
            if step == 11:
                tracer.stop()

    return closes


def late_end(model: Any, tracer: Any) -> None:
    import time

    for _ in tracer.iter[:]:
        tracer.save(model.logits[0], "logits")
    time.sleep(4)
    tracer.save(1, "end")


@pytest.fixture(autouse=True)
def no_edit_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "model" in request.fixturenames:
        request.getfixturevalue("model").clear_edits()


@pytest.fixture(scope="module")
def hf() -> Any:
    from nnsight_async.testing import hf_model

    return hf_model("llama")


class Reading:
    """The logits of a run, as they come, and the file that tells its block to go on."""

    def __init__(self, run: Any, told: Path) -> None:
        self._run = run
        self._stream = run.saves["logits"].stream()
        self._seen: list[torch.Tensor] = []
        self._told = told

    async def first(self) -> None:
        self._seen.append(await anext(self._stream))

    async def there(self, step: int) -> None:
        """Wait until the values of a step have come, though its token may be on its way."""
        while self._run._job.ledger.through < step:  # noqa: ASYNC110 -- another thread's
            await asyncio.sleep(0.01)

    def tell(self) -> None:
        self._told.touch()

    async def check(self, hf: Any) -> None:
        """It goes on to its end, and all values are there."""
        self.tell()
        self._seen += [value async for value in self._stream]
        expected = generation(hf, PROMPT, len(self._seen)).logits
        torch.testing.assert_close(torch.stack(self._seen), expected, rtol=1e-4, atol=1e-4)


@asynccontextmanager
async def going(
    model: VLLM, tmp_path: Path, probe: Any = until, sampling: dict[str, Any] = LONG
) -> AsyncIterator[tuple[Any, Reading]]:
    """A run that has sent its first value, and goes on until it is told."""
    told = tmp_path / uuid4().hex
    async with asyncio.timeout(WITHIN), model.run(PROMPT, probe(told), **sampling) as run:
        reading = Reading(run, told)
        await reading.first()
        yield run, reading


async def check_whole(model: VLLM, tmp_path: Path, hf: Any) -> None:
    async with going(model, tmp_path) as (_, reading):
        await reading.check(hf)


def inbox_of(model: VLLM) -> Any:
    engine: Any = model._engine
    return engine._inbox


def file_of(address: str) -> Path:
    return Path(address.removeprefix("ipc://"))


def in_engine(model: VLLM, function: Any) -> None:
    engine: Any = model._engine
    engine._loop.call_soon_threadsafe(function)


def foreign(address: str, *messages: list[Any]) -> None:
    """Send from a socket that is none of the worker's."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as sender:
        sender.connect(address)
        for parts in messages:
            sender.send_multipart(parts)


async def test_what_is_no_message_of_the_worker_is_dropped(model: VLLM, tmp_path: Path, hf: Any) -> None:
    before = await at_rest(model)
    address = inbox_of(model).address
    elsewhere = frames.encode(Message([], [Frame(1, 0)], "ipc:///elsewhere/inbox-0"), [])
    unknown = frames.encode(Message([], [Frame(1 << 40, 0)], address), [])
    future = b"\x95\xa12\x90\x90\x90\xc0"
    async with going(model, tmp_path, holding, SAMPLING) as (_, reading):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(file_of(address)))
            raw.sendall(os.urandom(4096))
        garbage = [os.urandom(100)]
        await asyncio.to_thread(foreign, address, [b""], garbage, [b"\xc0"] * 50, [future], elsewhere, unknown)
        await reading.check(hf)
    after = before
    async with asyncio.timeout(WITHIN):  # ZeroMQ takes some of the raw bytes for a message
        while after["damaged"] - before["damaged"] < 5 or after["late_frames"] == before["late_frames"]:
            after = await at_rest(model)
    assert after["late_frames"] - before["late_frames"] == 1


async def test_a_damaged_frame_is_the_error_of_its_run(model: VLLM, tmp_path: Path, hf: Any) -> None:
    async with going(model, tmp_path) as (_, others):
        async with going(model, tmp_path) as (run, _):
            key = run._job.key
            address = inbox_of(model).address
            damaged = Message(
                [("float32", [512])], [Frame(key, 1, [("logits", "set", ["tensor", 0, 0, [512]])])], address
            )
            await asyncio.to_thread(foreign, address, [frames.encode(damaged, [])[0], b"\x00" * 100])
            with pytest.raises(ValuesLostError, match="came damaged"):
                await run.result
        await others.check(hf)
    await drained(model)


async def test_a_socket_file_that_is_unlinked_is_missed_by_nobody(model: VLLM, tmp_path: Path, hf: Any) -> None:
    async with going(model, tmp_path) as (_, reading):
        file_of(inbox_of(model).address).unlink()
        await reading.check(hf)


async def test_a_socket_that_is_closed_in_the_client_is_replaced(model: VLLM, tmp_path: Path, hf: Any) -> None:
    before = inbox_of(model).address
    async with going(model, tmp_path) as (run, _):
        plain = asyncio.ensure_future(model.generate(PROMPT, **SAMPLING))
        in_engine(model, inbox_of(model)._socket.close)
        with pytest.raises(ValuesLostError, match="were lost"):
            await run.result
        assert (await plain)[0].outputs[0].token_ids == generation(hf, PROMPT, STEPS).ids
    assert inbox_of(model).address != before
    await check_whole(model, tmp_path, hf)
    await drained(model)


async def test_a_socket_that_is_closed_in_the_worker_is_replaced(model: VLLM, tmp_path: Path, hf: Any) -> None:
    await check_whole(model, tmp_path, hf)  # and so the worker knows the inbox of the test before
    async with going(model, tmp_path, closing_the_socket) as (_, reading):
        await reading.there(3)
        await reading.check(hf)


async def test_a_worker_that_cannot_reach_the_client_any_more(model: VLLM, tmp_path: Path, hf: Any) -> None:
    inbox = inbox_of(model)
    before = inbox.address
    async with going(model, tmp_path, closing_the_socket) as (run, reading):
        await reading.there(3)
        file_of(before).unlink()
        reading.tell()
        with pytest.raises(ValuesLostError, match="step 4 were lost"):
            await run.result
        assert len(run._job.tokens) == 4
    await check_whole(model, tmp_path, hf)
    assert inbox.address != before
    await drained(model)


async def test_the_last_frame_is_missed(model: VLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = inbox_of(model)
    deliver = inbox._deliver
    with monkeypatch.context() as patch:
        patch.setattr(inbox, "_deliver", lambda frame: None if frame.ended else deliver(frame))
        async with asyncio.timeout(WITHIN), model.run(PROMPT, every_logits, **SAMPLING) as run:
            with pytest.raises(ValuesLostError):
                await run.result
    await drained(model)


async def test_the_last_frame_of_an_edit_on_a_request_from_elsewhere_is_missed(
    model: VLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox = inbox_of(model)
    deliver = inbox._deliver
    await model.edit(every_logits)

    async def last() -> Any:
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        return [one async for one in model.vllm_entrypoint.generate({"prompt_token_ids": PROMPT}, params, "own")][-1]

    with monkeypatch.context() as patch:
        patch.setattr(inbox, "_deliver", lambda frame: None if frame.ended else deliver(frame))
        async with asyncio.timeout(WITHIN):
            with pytest.raises(EngineGenerateError) as caught:
                await asyncio.wrap_future(model._engine.call(last()))
    assert isinstance(caught.value.__cause__, ValuesLostError)
    output = await asyncio.wrap_future(model._engine.call(last()))
    assert output.saves["logits"].shape == (512,)
    await drained(model)


async def test_a_block_that_takes_its_time_after_the_last_token_is_waited_for(model: VLLM) -> None:
    async with asyncio.timeout(WITHIN), model.run(PROMPT, late_end, **SAMPLING) as run:
        assert await run.saves["end"] == 1


# -- at the start ------------------------------------------------------------------------------------------------------


def not_started(llama: str) -> str:
    threads = threading.active_count()
    with pytest.raises(EngineStartError) as caught:
        VLLM(llama, dispatch=True, **tiny_engine_args())
    assert threading.active_count() <= threads
    return str(caught.value)


def test_a_folder_whose_path_is_too_long_for_a_socket(
    llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    words = not_started(llama)
    assert f"{str(folder)!r}" in words
    assert "TMPDIR" in words


def test_a_folder_that_cannot_be_written_to(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/self")
    assert "TMPDIR" in not_started(llama)


def test_a_disk_that_is_full(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: Any) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    assert "No space left on device" in not_started(llama)


def test_a_socket_that_cannot_be_made(llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / ("long" * 25)
    home.mkdir()
    monkeypatch.setattr(engine_module, "make_home", lambda: home)
    assert "ZMQError" in not_started(llama)
