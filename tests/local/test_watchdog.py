"""Blocks that do not come back, in a thread that no signal reaches."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from nnsight_async import BlockTimeoutError, TransformersModel
from nnsight_async.interleave.watchdog import Expired
from nnsight_async.local.watchdog import ThreadWatchdog
from nnsight_async.testing.oracle import generation

PROMPT = [5, 17, 101, 9, 33]


@pytest.fixture(scope="module")
def hasty(llama):
    with TransformersModel(llama, block_timeout=1.0) as model:
        yield model


@pytest.fixture(autouse=True)
def and_others_go_on(hasty, hf):
    yield
    with hasty.trace(PROMPT, max_tokens=2, temperature=0.0, ignore_eos=True) as tracer:
        pass
    assert tracer.result.outputs[0].token_ids == generation(hf, PROMPT, 2).ids


def test_an_endless_loop(hasty):
    with pytest.raises(BlockTimeoutError, match=r"more than 1 s") as caught, hasty.trace(PROMPT):  # noqa: PT012
        hidden = hasty.model.layers[1].output
        while True:
            pass
    lines = [entry.lineno for entry in caught.traceback if entry.path.name == "test_watchdog.py"]
    assert lines[-1] > lines[0]


def test_a_block_that_catches_it_twice(hasty):
    with pytest.raises(BlockTimeoutError), hasty.trace(PROMPT):  # noqa: PT012
        for _ in range(2):
            try:
                while True:
                    pass
            except BaseException:
                pass
        while True:
            pass


def test_one_invoke_of_two(hasty, hf):
    with pytest.raises(BlockTimeoutError), hasty.trace() as tracer:  # noqa: PT012
        with tracer.invoke(PROMPT):
            while hasty.model.layers[0].output is not None:
                pass
        with tracer.invoke(PROMPT):
            logits = hasty.logits.save()
    torch.testing.assert_close(logits, generation(hf, PROMPT, 1).logits, rtol=1e-4, atol=1e-4)


def test_a_call_that_waits_is_ended_when_it_comes_back(hasty):
    with pytest.raises(BlockTimeoutError), hasty.trace(PROMPT):  # noqa: PT012
        time.sleep(1.5)
        never = hasty.logits.save()


def test_no_strike_comes_after_the_end_of_a_turn():
    """Turns that end at about the time of their deadline: `end` raises at most once, and nothing comes later."""
    watchdog = ThreadWatchdog()
    struck, failures = 0, []

    def turns() -> None:
        nonlocal struck
        try:
            for number in range(20):
                try:
                    watchdog.begin(0.02)
                    until = time.monotonic() + 0.1 + 0.0005 * number
                    while time.monotonic() < until:
                        pass
                except Expired:
                    struck += 1
                finally:
                    try:
                        watchdog.end()
                    except Expired:
                        watchdog.end()
                for _ in range(1000):
                    pass
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=turns)
    thread.start()
    thread.join(60)
    watchdog.close()
    assert not thread.is_alive()
    assert not failures
    assert struck
