"""Outputs of one request come to what vLLM's own `RequestOutput.add` makes of them, one by one."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm import CompletionOutput, RequestOutput
from vllm.logprobs import Logprob

from nnsight_async.runs.deltas import Deltas


def delta(number: int, ids: list[int], text: str, *, logprobs: bool, last: bool) -> Any:
    found = [{token: Logprob(-1.0 - token), token + 1: Logprob(-9.0)} for token in ids] if logprobs else None
    completion = CompletionOutput(0, text, list(ids), -float(number) if logprobs else None, found)
    completion.finish_reason, completion.stop_reason = ("stop", "###") if last else (None, None)
    return RequestOutput("r", "prompt", [1, 2], None, [completion], last, kv_transfer_params={"at": number})


def drawn(seed: int, *, logprobs: bool) -> list[Any]:
    """Mostly one token each, at times none or several; the last may have text without a token."""
    draw = random.Random(seed)
    counts = [*draw.choices([1, 1, 1, 0, 3], k=draw.randrange(1, 12)), draw.randrange(2)]
    numbers = iter(range(100))
    made: list[Any] = []
    for number, count in enumerate(counts):
        ids = [next(numbers) for _ in range(count)]
        text = draw.choice(["", "a", " word"])
        made.append(delta(number, ids, text, logprobs=logprobs, last=number == len(counts) - 1))
    return made


def as_data(output: Any) -> dict[str, Any]:
    (completion,) = output.outputs
    return {**vars(output), "outputs": {**vars(completion), "token_ids": list(completion.token_ids)}}


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_what_vllm_makes_of_them(seed: int, logprobs: bool) -> None:
    expected, *others = drawn(seed, logprobs=logprobs)
    for other in others:
        expected.add(other, aggregate=True)
    deltas = Deltas()
    for each in drawn(seed, logprobs=logprobs):
        deltas.add(each)
    assert as_data(deltas.output) == as_data(expected)


def test_a_mask_of_each_token_is_kept() -> None:
    from vllm.outputs import SamplingMask

    deltas = Deltas()
    for number in range(4):
        one = delta(number, [number], "a", logprobs=False, last=number == 3)
        one.outputs[0].sampling_mask = SamplingMask([[number, 7]])
        deltas.add(one)
    assert deltas.output.outputs[0].sampling_mask.token_ids == [[0, 7], [1, 7], [2, 7], [3, 7]]
    assert deltas.output.outputs[0].token_ids == [0, 1, 2, 3]


@pytest.mark.parametrize("logprobs", [False, True])
def test_the_tokens_of_each(logprobs: bool) -> None:
    deltas = Deltas()
    found = [deltas.add(one) for one in (
        delta(0, [5], "a", logprobs=logprobs, last=False),
        delta(1, [], "", logprobs=logprobs, last=False),
        delta(2, [6, 7], "bc", logprobs=logprobs, last=True),
    )]  # fmt: skip
    five, six, seven = (-6.0, -7.0, -8.0) if logprobs else (None, None, None)
    assert found == [[(5, "a", five, None)], [], [(6, "", six, None), (7, "bc", seven, "stop")]]
