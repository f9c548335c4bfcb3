# ruff: noqa: SIM117 -- a block is what is assigned in it, and may well be several statements
"""Where a block can stand, and who looks on: statements of all shapes, debuggers, coverage, threads."""

from __future__ import annotations

import asyncio
import contextlib
import linecache
import sys
import threading
from typing import Any

import coverage
import pytest
import torch

from nnsight_async import save
from nnsight_async.testing.oracle import generation

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
PROMPT = [5, 17, 101, 9, 33, 250, 77]
GREEDY = {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="session")
def expected(hf: Any) -> Any:
    return generation(hf, PROMPT, 2)


@pytest.fixture
def untraced() -> Any:
    """Whatever traces these tests is put away, and comes back."""
    before = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(before)


def test_several_context_managers_in_one_header(model, expected):
    with contextlib.nullcontext(2.0) as scale, model.trace(PROMPT, **GREEDY) as tracer, contextlib.suppress(KeyError):
        scaled = (model.logits * scale).save()
    torch.testing.assert_close(scaled, expected.logits[:1] * 2, **CLOSE)


def test_a_header_of_several_lines(model, expected):
    with (
        torch.no_grad(),
        model.trace(
            PROMPT,
            max_tokens=2,
            temperature=0.0,
            ignore_eos=True,
        ) as tracer,
    ):
        for _ in tracer.iter[:]:
            logits = (
                model
                .logits
                .save()
            )  # fmt: skip
    torch.testing.assert_close(logits, expected.logits[1:], **CLOSE)


async def test_an_async_header_with_a_timeout_and_a_task_group(model, expected):
    async with asyncio.timeout(60), model.trace(PROMPT, **GREEDY) as tracer, asyncio.TaskGroup():
        logits = model.logits.save()
    torch.testing.assert_close(await logits, expected.logits[:1], **CLOSE)


def test_a_statement_on_one_line(model, expected):
    with model.trace(PROMPT, **GREEDY): logits = model.logits.save()  # noqa: E701  # fmt: skip
    torch.testing.assert_close(logits, expected.logits[:1], **CLOSE)


def test_a_loop_of_traces_takes_the_values_of_each_round(model, expected):
    found = []
    for scale in (1.0, -2.0):
        with model.trace(PROMPT, **GREEDY):
            logits = (model.logits * scale).save()
        found.append(logits)
    torch.testing.assert_close(torch.cat(found), expected.logits[:1] * torch.tensor([[1.0], [-2.0]]), **CLOSE)


def test_in_a_method_a_closure_and_a_class_body(model, expected):
    class Probing:
        scale = 2.0

        def read(self):
            def inside():
                nonlocal logits
                with model.trace(PROMPT, **GREEDY):
                    logits = (model.logits * scale).save()

            logits, scale = None, self.scale
            inside()
            return logits

    torch.testing.assert_close(Probing().read(), expected.logits[:1] * 2, **CLOSE)


def test_in_a_generator_function_and_a_comprehension_around_it(model, expected):
    def each(scales):
        for scale in scales:
            with model.trace(PROMPT, **GREEDY):
                logits = (model.logits * scale).save()
            yield logits

    found = torch.cat([logits for logits in each([1.0, 3.0])])  # noqa: C416
    torch.testing.assert_close(found, expected.logits[:1] * torch.tensor([[1.0], [3.0]]), **CLOSE)


def test_text_that_only_linecache_knows(model, expected):
    text = "with model.trace(prompt, **greedy):\n    logits = (model.logits * scale).save()\n"
    linecache.cache["<made up>"] = (len(text), None, text.splitlines(keepends=True), "<made up>")
    for scale in (2.0, 3.0):
        names = {"model": model, "prompt": PROMPT, "greedy": GREEDY, "scale": scale}
        exec(compile(text, "<made up>", "exec"), names)
        torch.testing.assert_close(names["logits"], expected.logits[:1] * scale, **CLOSE)
    del linecache.cache["<made up>"]


def test_text_that_nobody_knows_names_the_function_form(model):
    with pytest.raises(RuntimeError, match=r"def probe\(model, tracer\)"):
        exec("with model.trace([5]):\n    logits = model.logits.save()\n", {"model": model})


def test_a_trace_function_sees_all_but_the_block_and_stays(model, expected, untraced):
    seen: list[int] = []

    def follow(frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code is not traced.__code__:
            return None
        if event == "line":
            seen.append(frame.f_lineno - traced.__code__.co_firstlineno)
        return follow

    def traced() -> Any:
        before = 1
        with model.trace(PROMPT, **GREEDY):
            inside = 2
            logits = model.logits.save()
        after = before + 1
        return logits

    sys.settrace(follow)
    logits = traced()
    still = sys.gettrace()
    sys.settrace(None)
    torch.testing.assert_close(logits, expected.logits[:1], **CLOSE)
    assert still is follow
    assert {1, 2, 5, 6} <= set(seen)
    assert 4 not in seen


def test_coverage_goes_on_after_a_trace(model, expected, untraced):
    def covered() -> Any:
        with model.trace(PROMPT, **GREEDY):
            logits = model.logits.save()
        again = logits + 1
        return again + 1

    measured = coverage.Coverage(data_file=None, include=[__file__], config_file=False)
    measured.start()
    try:
        found = covered()
    finally:
        measured.stop()
    torch.testing.assert_close(found, expected.logits[:1] + 2, **CLOSE)
    first = covered.__code__.co_firstlineno
    lines = set(measured.get_data().lines(__file__) or ())
    assert {first + 1, first + 3, first + 4} <= lines
    assert first + 2 not in lines


def test_threads_that_trace_at_the_same_time(model, expected):
    found: dict[float, torch.Tensor] = {}

    def work(scale: float) -> None:
        with model.trace(PROMPT, **GREEDY) as tracer:
            for _ in tracer.iter[:]:
                logits = (model.logits * scale).save()
        found[scale] = logits

    threads = [threading.Thread(target=work, args=[float(number)]) for number in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    for scale, logits in found.items():
        torch.testing.assert_close(logits, expected.logits[1:] * scale, **CLOSE)


@pytest.mark.parametrize(
    ("made", "kind", "advice"),
    [
        (threading.Lock, "a lock", "inside the block"),
        (lambda: open(__file__), "a TextIOWrapper", "inside the block|above the block"),  # noqa: SIM115, PTH123
        (lambda: (n for n in range(3)), "a generator", "list"),
    ],
    ids=["a lock", "a file", "a generator"],
)
def test_a_variable_that_cannot_travel_is_named(model, made, kind, advice):
    unwieldy = {"deep": [made()]}
    with pytest.raises(TypeError, match=r"'unwieldy', a dict \(unwieldy\['deep'\]\[0\] is .*\)(.|\n)*" + f"({advice})"):
        with model.trace(PROMPT, **GREEDY):
            seen = save(len(unwieldy))
    for part in unwieldy["deep"]:
        getattr(part, "close", lambda: None)()
