"""One block over many prompts: bounded, lazy, in either order, and gone when it is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

from nnsight_async import SurfaceError
from nnsight_async.testing.engine import drained
from nnsight_async.testing.oracle import generation
from tests.conftest import LONG

pytestmark = pytest.mark.backends("vllm", "transformers")

STEPS = 3
GREEDY: dict[str, Any] = {"max_tokens": STEPS, "temperature": 0.0, "ignore_eos": True}


def prompts(number: int) -> list[list[int]]:
    return [[4 + at, 200 - at, *range(10, 10 + at % 5)] for at in range(number)]


def probe(model: Any, tracer: Any) -> None:
    logits = model.logits.save()


def fails_at_42(model: Any, tracer: Any) -> None:
    first = int(model.model.embed_tokens.input[0])
    if first == 42:
        raise LookupError("prompt 42")
    tracer.save(first, "first")


def ids(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def test_a_result_for_every_prompt(model, hf):
    given = prompts(20)
    results = list(model.map(given, probe, concurrency=4, **GREEDY))
    assert sorted(result.index for result in results) == list(range(20))
    for result in results:
        expected = generation(hf, given[result.index], STEPS)
        assert result.prompt is given[result.index]
        assert result.error is None
        assert ids(result.output) == expected.ids
        torch.testing.assert_close(result.saves["logits"][0], expected.logits[0], rtol=1e-4, atol=1e-4)


async def test_the_same_awaited(model, hf):
    given = prompts(10)
    results = [result async for result in model.map(given, probe, concurrency=3, **GREEDY)]
    assert len(results) == 10
    for result in results:
        assert ids(result.output) == generation(hf, given[result.index], STEPS).ids


def test_results_come_as_they_end_or_in_order(model, tmp_path):
    others_are_there = tmp_path / "there"

    def waits(model: Any, tracer: Any) -> None:
        first = int(model.model.embed_tokens.input[0])
        for _ in tracer.iter[:]:
            if first != 4 or others_are_there.exists():
                tracer.stop()

    given, as_they_end = prompts(6), []
    for result in model.map(given, waits, **LONG):
        as_they_end.append(result.index)
        if len(as_they_end) == 5:
            others_are_there.touch()
    assert as_they_end[-1] == 0
    others_are_there.unlink()
    in_order = model.map(given, waits, ordered=True, **{**LONG, "max_tokens": 50})
    assert [result.index for result in in_order] == list(range(6))


class Watched:
    """Prompts that know how many of them were taken."""

    def __init__(self, number: int) -> None:
        self.taken = 0
        self._prompts = prompts(number)

    def __iter__(self) -> Iterator[list[int]]:
        for prompt in self._prompts:
            self.taken += 1
            yield prompt


@pytest.mark.parametrize("ordered", [False, True])
def test_prompts_are_taken_as_there_is_room(model, ordered):
    watched = Watched(30)
    for given, _ in enumerate(model.map(watched, probe, concurrency=3, ordered=ordered, **GREEDY)):
        assert watched.taken - given <= 2 * 3
    assert watched.taken == 30


async def test_no_more_than_concurrency_are_in_flight(model):
    most = 0
    async for _ in model.map(prompts(12), probe, concurrency=2, **GREEDY):
        most = max(most, (await model.stats())["client_runs"])
    assert most <= 2


async def test_async_prompts_are_waited_for_while_results_are_given(model):
    given = asyncio.Semaphore(1)

    async def answering() -> AsyncIterator[list[int]]:
        for prompt in prompts(4):
            await given.acquire()  # the next prompt comes only when the result of the last has been given
            yield prompt

    indices = []
    async for result in model.map(answering(), probe, **GREEDY):
        indices.append(result.index)
        given.release()
    assert indices == [0, 1, 2, 3]


def test_an_error_ends_it_and_what_is_in_flight(model):
    given = [[42], *([prompt] for prompt in range(50, 80))]
    found = model.map(given, fails_at_42, concurrency=8, ordered=True, **LONG)
    with pytest.raises(LookupError, match="prompt 42") as caught:
        next(iter(found))
    assert "this was prompt 0" in "".join(caught.value.__notes__)
    assert list(found) == []
    asyncio.run(drained(model))


def test_errors_as_results(model):
    given = [[41], [42], [43], [], ["not a", "prompt"]]
    results = list(model.map(given, fails_at_42, ordered=True, return_errors=True, **GREEDY))
    assert [type(result.error) for result in results] == [type(None), LookupError, type(None), ValueError, ValueError]
    assert [result.saves for result in results] == [{"first": 41}, {}, {"first": 43}, {}, {}]
    assert [result.output is None for result in results] == [False, True, False, True, True]
    assert results[4].prompt is given[4]


def test_leaving_early_cancels(model):
    for _ in model.map(prompts(20), probe, concurrency=5, **LONG):
        break
    asyncio.run(drained(model))


async def test_leaving_early_cancels_awaited(model):
    async for _ in model.map(prompts(20), probe, concurrency=5, **LONG):
        break
    await drained(model)


async def test_cancelling_the_task_cancels(model):
    started = asyncio.Event()

    async def consume() -> None:
        async for _ in model.map([[5], *prompts(5)], stops_at_5, concurrency=6, **LONG):
            started.set()

    def stops_at_5(model: Any, tracer: Any) -> None:
        if int(model.model.embed_tokens.input[0]) == 5:
            tracer.stop()

    task = asyncio.create_task(consume())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await drained(model)


async def test_an_error_of_the_source_is_raised(model):
    async def broken() -> AsyncIterator[list[int]]:
        yield [5]
        raise OSError("the source")

    with pytest.raises(OSError, match="the source"):
        async for _ in model.map(broken(), probe, **LONG):
            pass
    await drained(model)


class Counted:
    pickled = 0

    def __getstate__(self) -> dict[str, Any]:
        type(self).pickled += 1
        return {}


def test_the_probe_is_pickled_once(model):
    counted, Counted.pickled = Counted(), 0

    def holds(model: Any, tracer: Any) -> None:
        tracer.save(type(counted).__name__, "held")

    assert {result.saves["held"] for result in model.map(prompts(5), holds, **GREEDY)} == {"Counted"}
    assert Counted.pickled == 1


def test_sequences_of_each(model):
    results = model.map([[5, 6], [7, 8]], probe, n=2, max_tokens=1, temperature=1.0, ordered=True)
    assert [(len(result.output.outputs), len(result.saves["logits"])) for result in results] == [(2, 2), (2, 2)]


def test_nothing_is_printed_off_a_terminal(model, capfd):
    assert len(list(model.map(prompts(3), probe, **GREEDY))) == 3
    assert capfd.readouterr().err == ""


def test_what_is_wrong_is_told_at_the_call(model):
    with pytest.raises(TypeError, match="did you mean 'max_tokens'"):
        model.map(prompts(1), probe, max_token=3)
    with pytest.raises(ValueError, match="temperature"):
        model.map(prompts(1), probe, temperature=-1.0)
    with pytest.raises(ValueError, match="concurrency"):
        model.map(prompts(1), probe, concurrency=0)
    with pytest.raises(ValueError, match="in a list"):
        model.map("one prompt", probe)
    with pytest.raises(TypeError, match="probe"):
        model.map(prompts(1), lambda: None)


def test_no_prompts(model):
    assert list(model.map([], probe)) == []


async def test_the_plain_form_does_not_block_a_loop(model):
    with pytest.raises(SurfaceError, match="async for"):
        for _ in model.map(prompts(1), probe):
            pass
