"""`n` sequences of one prompt: the block runs once for each, and names come back as lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight_async import save

PROMPT = [5, 17, 101, 9, 33]
STEPS = 5
DRAWN: dict[str, Any] = {"max_tokens": STEPS, "temperature": 1.0, "seed": 7, "ignore_eos": True}


def sequences(output: Any) -> list[list[int]]:
    return [list(completion.token_ids) for completion in output.outputs]


def solo(model: Any, number: int, prompt: list[int] = PROMPT, seed: int = 7) -> list[int]:
    """What one request with the seed of sequence `number` draws."""
    with model.trace(prompt, **{**DRAWN, "seed": seed + number}) as tracer:
        pass
    return list(tracer.result.outputs[0].token_ids)


def of_plain_vllm(model: Any, n: int) -> list[list[int]]:
    """The same request, fanned out by vLLM itself."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    async def last() -> Any:
        params = SamplingParams(n=n, **DRAWN, output_kind=RequestOutputKind.FINAL_ONLY)
        outputs = model.vllm_entrypoint.generate({"prompt_token_ids": PROMPT}, params, "of plain vLLM")
        return [output async for output in outputs][-1]

    return sequences(model._engine.call(last()).result())


@pytest.mark.backends("vllm")
def test_sequences_are_those_of_vllm_and_of_solo_runs(model):
    with model.trace(PROMPT, n=3, **DRAWN) as tracer:
        samples = save([])
        for _ in tracer.iter[:]:
            samples.append(model.samples)
    drawn = sequences(tracer.result)
    assert drawn == of_plain_vllm(model, 3) == [solo(model, number) for number in range(3)]
    assert drawn[0] != drawn[1]
    assert [[int(sample) for sample in of_one] for of_one in samples] == drawn
    assert [completion.index for completion in tracer.result.outputs] == [0, 1, 2]
    assert [completion.finish_reason for completion in tracer.result.outputs] == ["length"] * 3
    assert tracer.result.finished
    assert len(tracer.result.saves["samples"]) == len(tracer.saves["samples"]) == 3


def test_without_a_seed_there_are_still_n(model):
    with model.trace(PROMPT, n=4, max_tokens=2, temperature=1.0):
        logits = model.logits.save()
    assert len(logits) == 4
    torch.testing.assert_close(logits[0], logits[3])


def test_a_sequence_that_did_not_save_is_none_in_the_list(model):
    last = solo(model, 1)[-1]
    assert last != solo(model, 0)[-1]
    with model.trace(PROMPT, n=2, **DRAWN) as tracer:
        for step in tracer.iter[:]:
            if step == STEPS - 1 and int(model.samples) == last:
                seen = save(step)
    assert seen == [None, STEPS - 1]


def test_invokes_with_sequences(model):
    other = [300, 4]
    with model.trace(**DRAWN) as tracer:
        with tracer.invoke(PROMPT, n=2) as twice:
            drawn = model.samples.save()
        with tracer.invoke(other):
            drawn = model.samples.save()
    assert sequences(tracer.result[0]) == sequences(twice.result) == [solo(model, 0), solo(model, 1)]
    assert sequences(tracer.result[1]) == [solo(model, 0, other)]
    assert [int(sample) for sample in drawn[0]] == [solo(model, at)[0] for at in range(2)]
    assert int(drawn[1]) == solo(model, 0, other)[0]


def test_the_function_form_and_plain_generation(model):
    def probe(model: Any, tracer: Any) -> None:
        tracer.save(model.samples, "drawn")

    expected = [solo(model, number) for number in range(2)]
    output = model.run(PROMPT, probe, n=2, **DRAWN).result()
    assert sequences(output) == expected
    assert [int(sample) for sample in output.saves["drawn"]] == [tokens[0] for tokens in expected]
    [plain] = model.generate(PROMPT, n=2, **DRAWN).result()
    assert sequences(plain) == expected


async def test_tokens_carry_the_number_of_their_sequence(model):
    async with model.trace(PROMPT, n=3, **DRAWN) as tracer:
        for _ in tracer.iter[:]:
            drawn = model.samples.save()
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    async for token in tracer.stream():
        assert (token.index, token.invoke) == (len(seen[token.sequence]), 0)
        assert int(token.saves["drawn"]) == token.id
        seen[token.sequence].append(token.id)
    assert list(seen.values()) == sequences(await tracer.result)
    assert [int(sample) for sample in await drawn] == [tokens[-1] for tokens in seen.values()]
    assert [int(sample) for sample in (await tracer.saves)["drawn"]] == [tokens[-1] for tokens in seen.values()]


async def test_an_error_of_one_sequence_is_that_of_the_value(model):
    async with model.trace(PROMPT, n=2, **DRAWN):
        drawn = model.samples.save()
        1 / 0
    with pytest.raises(ZeroDivisionError):
        await drawn


@pytest.mark.backends("vllm", "served")
def test_greedy_sequences_are_refused_as_by_vllm(model):
    with pytest.raises(ValueError, match="n must be 1 when using greedy sampling"):
        model.trace(PROMPT, n=2, temperature=0.0)
