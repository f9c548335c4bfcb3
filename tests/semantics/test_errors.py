"""Whatever a block does, its caller is told what and where, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import operator
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import greenlet
import pytest
import torch

from nnsight_async import (
    BlockError,
    BlockTimeoutError,
    GenerationEndedError,
    LocationError,
    NNsightError,
    NotSavedError,
    OutOfOrderError,
    SaveBudgetError,
    SaveError,
    ShapeError,
    ShippingError,
    save,
)
from nnsight_async.testing.engine import drained
from nnsight_async.testing.oracle import generation

PROMPT = [5, 17, 101, 9, 33, 250, 77]
STEPS = 4
GREEDY = {"max_tokens": STEPS, "temperature": 0.0, "ignore_eos": True}
OTHER = [7, 8, 9]


class RefusedError(Exception):
    """Defined here, where the worker has no module of that name."""


class AwkwardError(ValueError):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"the code is {code}")
        self.code = code


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def raises(error: Any) -> Any:
    def probe(model: Any, tracer: Any) -> None:
        for step in tracer.iter[:]:
            model.model.layers[1].output
            if step == 2:
                raise error

    return probe


def raises_awkwardly(model: Any, tracer: Any) -> None:
    model.logits
    raise AwkwardError(code=7)


def exits(model: Any, tracer: Any) -> None:
    model.model.layers[0].output
    sys.exit(3)


def divides(model: Any, tracer: Any) -> None:
    try:
        model.model.layers[0].resid_post / 0
        1 / 0
    except ZeroDivisionError as error:
        raise RefusedError("divided") from error


def recurses(model: Any, tracer: Any) -> None:
    model.model.layers[0].output

    def again() -> None:
        again()

    again()


def puts(value: Any) -> Any:
    def probe(model: Any, tracer: Any) -> None:
        model.model.layers[1].mlp.output = value

    return probe


def shrinks(model: Any, tracer: Any) -> None:
    model.model.layers[1].mlp.output.resize_(3, 3)


def puts_one_of_two(model: Any, tracer: Any) -> None:
    model.model.layers[1].output = (model.model.layers[1].output[0],)


def reads_backwards(model: Any, tracer: Any) -> None:
    model.model.layers[2].output
    model.model.layers[1].output


def reads_after_logits(model: Any, tracer: Any) -> None:
    model.logits
    model.model.layers[1].output


def misspells(model: Any, tracer: Any) -> None:
    model.model.layers[1].mpl.output


def counts_too_far(model: Any, tracer: Any) -> None:
    model.model.layers[99].output


def saves_an_object(model: Any, tracer: Any) -> None:
    save(object(), "thing")


def appends_an_object(model: Any, tracer: Any) -> None:
    kept = save([], "kept")
    for _ in tracer.iter[:]:
        kept.append(object())


def saves_half_a_character(model: Any, tracer: Any) -> None:
    model.model.layers[0].output
    save("\ud800", "half")


def reads_too_long(model: Any, tracer: Any) -> None:
    for _ in tracer.iter[:]:
        model.logits
    model.logits


def saves_too_much(model: Any, tracer: Any) -> None:
    save(torch.zeros(1).expand(1 << 30), "much")


def switches_modes(model: Any, tracer: Any) -> None:
    torch.set_default_dtype(torch.float64)
    model.logits


def appends_too_much(model: Any, tracer: Any) -> None:
    kept = save([], "kept")
    for _ in tracer.iter[:]:
        kept.append(torch.zeros(1).expand(1 << 30))


def shrinks_and_goes_on(model: Any, tracer: Any) -> None:
    model.model.layers[1].mlp.output.resize_(3, 3)
    model.logits


def misuses_torch(model: Any, tracer: Any) -> None:
    torch.nn.functional.interpolate(model.logits, 3)


def changes_a_weight(model: Any, tracer: Any) -> None:
    model.model.norm.weight[:] = 0


def goes_on(model: Any, tracer: Any) -> None:
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(30)


def catches_everything(model: Any, tracer: Any) -> None:
    model.logits
    for _ in range(3):
        try:
            model.model.layers[0].output
        except OutOfOrderError:
            continue
    raise RefusedError("gave up")


FAULTS = {
    "own type": (raises(RefusedError("boom", 7)), RefusedError, "boom"),
    "awkward arguments": (raises_awkwardly, AwkwardError, "the code is 7"),
    "message that raises": (raises(MuteError(1)), MuteError, None),
    "cause": (divides, RefusedError, "divided"),
    "recursion": (recurses, RecursionError, "maximum recursion depth"),
    "group": (raises(ExceptionGroup("two", [ValueError(1), KeyError(2)])), ExceptionGroup, "two"),
    "sys.exit": (exits, BlockError, "SystemExit: 3"),
    "KeyboardInterrupt": (raises(KeyboardInterrupt()), BlockError, "KeyboardInterrupt"),
    "GeneratorExit": (raises(GeneratorExit()), BlockError, "GeneratorExit"),
    "CancelledError": (raises(asyncio.CancelledError()), BlockError, "CancelledError"),
    "GreenletExit": (raises(greenlet.GreenletExit()), BlockError, "GreenletExit"),
    "StopIteration": (raises(StopIteration(1)), BlockError, "StopIteration: 1"),
    "StopAsyncIteration": (raises(StopAsyncIteration()), BlockError, "StopAsyncIteration"),
    "rows": (puts(torch.zeros(3, 128)), ShapeError, r"owns 7 rows of it.*\(7, 128\).*\(3, 128\)"),
    "width": (puts(torch.zeros(7, 5)), ShapeError, r"\(7, 128\).*\(7, 5\)"),
    "not a tensor": (puts("zero"), ShapeError, "a str"),
    "dtype": (puts(torch.zeros(7, 128, dtype=torch.complex64)), ShapeError, "complex64"),
    "resized behind our back": (shrinks, (ShapeError, RuntimeError), None),
    "backwards": (reads_backwards, OutOfOrderError, r"layers.1.\.output has already been passed in step 0"),
    "after the logits": (reads_after_logits, OutOfOrderError, "already been passed"),
    "missing path": (misspells, LocationError, "mlp"),
    "missing index": (counts_too_far, (LocationError, IndexError), "99"),
    "object saved": (saves_an_object, SaveError, "object"),
    "object appended": (appends_an_object, SaveError, "kept"),
    "text that cannot be written": (saves_half_a_character, SaveError, "half"),
    "after the end": (reads_too_long, GenerationEndedError, "after the last step"),
    "too many bytes": (saves_too_much, SaveBudgetError, "max_save_bytes"),
    "too many bytes appended": (appends_too_much, SaveBudgetError, "max_save_bytes"),
    "torch misused": (misuses_torch, NotImplementedError, None),
    "modes": (switches_modes, NNsightError, "mode of torch"),
    "errors that are caught": (catches_everything, RefusedError, "gave up"),
}
fault = pytest.mark.parametrize(("probe", "kind", "words"), FAULTS.values(), ids=FAULTS)


def reads_logits(model: Any, tracer: Any) -> None:
    logits = tracer.save([], "logits")
    for _ in tracer.iter[:]:
        logits.append(model.logits)


@pytest.fixture(scope="session")
def expected(hf: Any) -> Any:
    return generation(hf, OTHER, STEPS)


def assert_unharmed(result: Any, expected: Any) -> None:
    assert list(result.outputs[0].token_ids) == expected.ids
    torch.testing.assert_close(torch.cat(result.saves["logits"]), expected.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.backends("vllm")
def test_a_structure_that_does_not_fit(model):
    with pytest.raises(ShapeError, match="a tuple of 2"):
        model.run(PROMPT, puts_one_of_two, **GREEDY).result(timeout=120)


@fault
async def test_a_fault_ends_its_own_run(model, expected, probe, kind, words):
    beside = model.run(OTHER, reads_logits, **GREEDY)
    faulty = model.run(PROMPT, probe, **GREEDY)
    async with asyncio.timeout(120), beside, faulty:
        with pytest.raises(kind, match=words):
            await faulty.result
        assert_unharmed(await beside.result, expected)


@fault
def test_a_fault_in_sync_form(model, expected, probe, kind, words):
    beside = model.run(OTHER, reads_logits, **GREEDY)
    outcome = beside.result
    with pytest.raises(kind, match=words) as caught:
        model.run(PROMPT, probe, **GREEDY).result(timeout=120)
    assert last_entry(caught.value).filename == __file__
    assert_unharmed(outcome(timeout=120), expected)


@pytest.mark.parametrize(
    ("probe", "line"),
    [
        (saves_too_much, 'save(torch.zeros(1).expand(1 << 30), "much")'),
        (appends_too_much, "for _ in tracer.iter[:]:"),
        (shrinks, "def shrinks(model: Any, tracer: Any) -> None:"),
        (shrinks_and_goes_on, "model.logits"),
        (switches_modes, "model.logits"),
        (changes_a_weight, "model.model.norm.weight[:] = 0"),
        pytest.param(goes_on, "time.sleep(30)", marks=pytest.mark.backends("vllm")),
        (misuses_torch, "torch.nn.functional.interpolate(model.logits, 3)"),
        (reads_backwards, "model.model.layers[1].output"),
        (reads_too_long, "model.logits"),
    ],
)
def test_the_line_of_what_was_not_raised_in_the_block_itself(model, probe, line):
    with pytest.raises(Exception) as caught:  # noqa: PT011  any
        model.run(PROMPT, probe, **GREEDY).result(timeout=120)
    assert (last_entry(caught.value).filename, last_entry(caught.value).line) == (__file__, line)


async def test_nothing_of_them_is_left(model):
    await drained(model)


async def collect(values: Any, into: list[Any]) -> None:
    async for value in values:
        into.append(value)  # noqa: PERF401  what came before the error counts


async def test_it_surfaces_wherever_the_run_is_waited_for(model):
    async with model.trace(PROMPT, **GREEDY) as tracer:
        for step in tracer.iter[:]:
            hidden = model.model.layers[1].resid_post.save()
            if step == 2:
                raise RefusedError("at two")
    tokens: list[Any] = []
    with pytest.raises(RefusedError, match="at two"):
        await collect(tracer.stream(), tokens)
    assert [token.saves["hidden"].shape[0] for token in tokens] == [7, 1]
    for _ in range(2):
        for waited in (hidden, tracer.saves, tracer.result, tracer.saves["hidden"]):
            with pytest.raises(RefusedError, match="at two") as caught:
                await waited
    values: list[Any] = []
    with pytest.raises(RefusedError, match="at two"):
        await collect(hidden.stream(), values)
    assert [value.shape[0] for value in values] == [7, 1]
    assert len(traceback.extract_tb(caught.value.__traceback__)) < 12


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []
        self.came = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self.came.set()


@pytest.fixture
def log() -> Iterator[Log]:
    found = Log()
    logging.getLogger("nnsight_async").addHandler(found)
    yield found
    logging.getLogger("nnsight_async").removeHandler(found)


async def test_an_error_that_nobody_asks_for_is_logged_once(model, log):
    async def leave() -> None:
        async with model.trace(PROMPT, **GREEDY):
            hidden = model.model.layers[1].resid_post.save()
            raise RefusedError("unheard")

    await leave()
    assert await asyncio.to_thread(log.came.wait, 60)
    await drained(model)
    (record,) = log.records
    assert (record.levelno, record.name) == (logging.ERROR, "nnsight_async.runs.unheard")
    shown = "".join(traceback.format_exception(*record.exc_info))
    assert f'line {leave.__code__.co_firstlineno + 3}, in leave\n    raise RefusedError("unheard")\n' in shown
    assert shown.endswith(f"RefusedError: unheard\nin step 0 of the run\nprompt: {PROMPT}\n")


async def test_an_error_of_one_invoke_that_nobody_asks_for_is_logged_once(model, log):
    async def leave() -> list[int]:
        async with model.trace(**GREEDY) as tracer:
            async with tracer.invoke(PROMPT):
                raise RefusedError("unheard")
            async with tracer.invoke(PROMPT) as other:
                top = model.logits.argmax(-1).save()
        return list((await other.result).outputs[0].token_ids)

    assert len(await leave()) == STEPS
    assert await asyncio.to_thread(log.came.wait, 60)
    assert [str(record.exc_info[1]) for record in log.records] == ["unheard"]


async def test_an_error_that_is_asked_for_late_is_not_logged(model, log):
    async with model.trace(PROMPT, **GREEDY) as tracer:
        hidden = model.model.layers[1].resid_post.save()
        raise RefusedError("heard")
    await drained(model)
    with pytest.raises(RefusedError, match="heard"):
        await hidden
    del hidden, tracer
    gc.collect()
    assert log.records == []


def last_entry(error: BaseException) -> traceback.FrameSummary:
    return traceback.extract_tb(error.__traceback__)[-1]


async def test_the_traceback_ends_at_the_users_line(model):
    async with model.trace(PROMPT, **GREEDY) as tracer:
        for step in tracer.iter[:]:
            model.model.layers[1].output
            if step == 1:
                raise RefusedError("here")
    with pytest.raises(RefusedError) as caught:
        await tracer.result
    entry = last_entry(caught.value)
    assert entry.filename == __file__
    assert entry.line == 'raise RefusedError("here")'
    assert entry.name == "test_the_traceback_ends_at_the_users_line"
    assert "in step 1 of the run" in caught.value.__notes__
    assert any(str(PROMPT) in note for note in caught.value.__notes__)


def test_the_traceback_of_the_sync_form(model):
    with pytest.raises(OutOfOrderError) as caught:  # noqa: PT012, SIM117
        with model.trace(PROMPT, **GREEDY):
            model.model.layers[1].output
            model.model.layers[0].output
    assert last_entry(caught.value).filename == __file__
    assert last_entry(caught.value).line == "model.model.layers[0].output"


def fails_below() -> None:
    raise RefusedError("below")


def test_the_traceback_goes_through_functions_of_the_user(model):
    def calls_below(model: Any, tracer: Any) -> None:
        fails_below()

    with pytest.raises(RefusedError) as caught:
        model.run(PROMPT, calls_below, **GREEDY).result()
    names = [entry.name for entry in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-2:] == ["calls_below", "fails_below"]
    assert last_entry(caught.value).line == 'raise RefusedError("below")'


def test_what_an_exception_carries(model):
    with pytest.raises(RefusedError) as caught:
        model.run(PROMPT, divides, **GREEDY).result()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(AwkwardError) as caught:
        model.run(PROMPT, raises_awkwardly, **GREEDY).result()
    assert caught.value.code == 7
    with pytest.raises(BlockError) as caught:
        model.run(PROMPT, exits, **GREEDY).result()
    assert isinstance(caught.value.__cause__, SystemExit)
    assert caught.value.__cause__.code == 3


def test_the_callers_class_is_left_alone(model):
    before = dict(vars(MuteError))
    with pytest.raises(MuteError):
        model.run(PROMPT, raises(MuteError(1)), **GREEDY).result()
    assert dict(vars(MuteError)) == before


class Unloadable:
    def __reduce__(self) -> Any:
        return operator.truediv, (1, 0)


def test_a_block_that_does_not_load(model):
    value = Unloadable()

    def uses(model: Any, tracer: Any) -> None:
        print(value)

    with pytest.raises(ZeroDivisionError) as caught:
        model.run(PROMPT, uses, max_tokens=200, ignore_eos=True).result(timeout=120)
    assert last_entry(caught.value).line == "def uses(model: Any, tracer: Any) -> None:"


class Endless:
    def __reduce__(self) -> Any:
        return time.sleep, (600,)


@pytest.mark.backends("vllm")
async def test_a_block_that_loads_for_too_long(model):
    value = Endless()

    def uses(model: Any, tracer: Any) -> None:
        print(value)

    async with model.run(PROMPT, uses, max_tokens=200, ignore_eos=True) as run:
        with pytest.raises(BlockTimeoutError, match="block_timeout"):
            await run.result
    with pytest.raises(BlockTimeoutError, match="block_timeout"):
        await model.edit(uses)
    async with model.run(PROMPT, reads_logits, **GREEDY) as run:
        assert (await run.result).saves
    await drained(model)


async def test_a_value_that_does_not_travel(model):
    with open(__file__) as file, pytest.raises(ShippingError, match="file"):  # noqa: ASYNC230, PTH123
        async with model.trace(PROMPT, **GREEDY):
            print(file)


@pytest.mark.backends("vllm")
async def test_a_prompt_that_vllm_refuses(model):
    run = model.run([5] * 5000, reads_logits)
    async with run:
        with pytest.raises(ValueError, match="4096"):
            await run.result
    with pytest.raises(ValueError, match="4096"):
        await model.generate([5] * 5000)
    await drained(model)


async def test_a_name_that_was_never_saved(model):
    async with model.trace(PROMPT, **GREEDY) as tracer:
        if tracer.step > 5:
            never = model.logits.save()
    with pytest.raises(NotSavedError, match="never"):
        await never
    await tracer.result
