"""Several prompts in one trace: each invoke is a request of its own, and all are submitted together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight_async import NotSavedError, OutsideBlockError, RunCancelledError, save
from nnsight_async.testing.engine import drained
from nnsight_async.testing.oracle import generation

PROMPTS = [[5, 17, 101, 9], [33, 250, 77, 8, 41, 200, 11], [300]]
STEPS = 4
GREEDY: dict[str, Any] = {"max_tokens": STEPS, "temperature": 0.0, "ignore_eos": True}
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def ids(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def test_every_invoke_is_a_request_of_its_own(model, hf):
    vectors = torch.randn(3, hf.config.hidden_size, generator=torch.Generator().manual_seed(1)) * 3
    with model.trace(**GREEDY) as tracer:
        for prompt, vector in zip(PROMPTS, vectors, strict=True):
            with tracer.invoke(prompt):
                logits = save([])
                for _ in tracer.iter[:]:
                    model.model.layers[1].resid_post[:] += vector
                    logits.append(model.logits)
    assert len(tracer.result) == len(logits) == 3
    for at, prompt in enumerate(PROMPTS):
        expected = generation(hf, prompt, STEPS, {1: lambda hidden, at=at: hidden + vectors[at]})
        assert ids(tracer.result[at]) == expected.ids
        torch.testing.assert_close(torch.cat(logits[at]), expected.logits, **CLOSE)


def test_a_name_is_a_list_if_several_saved_it_and_else_the_value(model, hf):
    with model.trace(**GREEDY) as tracer:
        with tracer.invoke(PROMPTS[0]):
            both = model.logits.save()
            first = model.samples.save()
        with tracer.invoke(PROMPTS[1]):
            both = model.logits.save()
            second = model.samples.save()
    assert [int(first), int(second)] == [generation(hf, prompt, 1).ids[0] for prompt in PROMPTS[:2]]
    torch.testing.assert_close(torch.cat(both), torch.cat([generation(hf, p, 1).logits for p in PROMPTS[:2]]), **CLOSE)
    assert tracer.saves["second"] is second
    assert [sorted(output.saves) for output in tracer.result] == [["both", "first"], ["both", "second"]]


def test_a_saver_by_condition_counts_if_it_saved(model):
    with model.trace(max_tokens=1) as tracer:
        for number, prompt in enumerate(PROMPTS):
            with tracer.invoke(prompt):
                if number != 1:
                    which = save(number)
                if number == 2:
                    last = save(number)
    assert which == [0, 2]
    assert last == 2


def test_names_bound_above_and_helpers_of_the_body(model):
    def ask(tracer: Any, prompt: list[int], factor: int) -> None:
        with tracer.invoke(prompt) as asked:
            number = (len(prompt) * factor).save()
        handles.append(asked)

    handles: list[Any] = []
    with model.trace(max_tokens=1) as tracer:
        factor = 10
        for prompt in PROMPTS:
            ask(tracer, prompt, factor)
            factor += 1
    assert [handle.saves["number"] for handle in handles] == [40, 77, 12] == tracer.saves["number"]


def test_settings_of_the_invoke_win(model, hf):
    with model.trace(max_tokens=3, temperature=0.0, ignore_eos=True) as tracer:
        with tracer.invoke(PROMPTS[0]):
            pass
        with tracer.invoke(PROMPTS[1], max_new_tokens=5):
            pass
    expected = [generation(hf, prompt, steps).ids for prompt, steps in zip(PROMPTS[:2], (3, 5), strict=True)]
    assert list(map(ids, tracer.result)) == expected


@pytest.mark.backends("vllm")
def test_none_as_adapter_of_an_invoke_means_the_base_model(model):
    adapter = object()
    with pytest.raises(ZeroDivisionError), model.trace(lora_request=adapter, priority=2) as tracer:  # noqa: PT012
        of_trace, base = tracer.invoke([5]).request, tracer.invoke([5], lora_request=None, priority=1).request
        assert (of_trace.lora, base.lora) == (adapter, None)
        assert (of_trace.priority, base.priority) == (2, 1)
        1 / 0  # nothing is to be submitted


def test_the_tracer_in_an_invoke_is_that_of_its_run(model, hf):
    with model.trace(**GREEDY) as tracer:
        with tracer.invoke(PROMPTS[0]):
            for step in tracer.iter[:]:
                if step == 1:
                    tracer.stop()
        with tracer.invoke(PROMPTS[1]):
            steps = save([])
            for step in tracer.all():
                steps.append(step)
    assert ids(tracer.result[0]) == generation(hf, PROMPTS[0], 2).ids
    assert ids(tracer.result[1]) == generation(hf, PROMPTS[1], STEPS).ids
    assert steps == [0, 1, 2, 3]


def test_an_exception_of_the_outer_body_submits_nothing(model):
    with pytest.raises(KeyError, match="of the body"), model.trace(max_tokens=1) as tracer:  # noqa: PT012
        with tracer.invoke(PROMPTS[0]) as asked:
            value = save(1)
        raise KeyError("of the body")
    with pytest.raises(OutsideBlockError):
        asked.result
    with pytest.raises(OutsideBlockError):
        tracer.result


def test_an_invoke_needs_a_prompt(model):
    with pytest.raises(ValueError, match=r"tracer\.invoke\(prompt\)"), model.trace(max_tokens=1) as tracer:  # noqa: SIM117
        with tracer.invoke(max_tokens=2):
            value = model.logits.save()


@pytest.mark.parametrize("prompt", ["", [], [[]], ["one", "two"], [PROMPTS[0], PROMPTS[1]]])
def test_prompts_are_checked_at_the_invoke(model, prompt):
    with pytest.raises(ValueError, match=r"empty|one prompt"), model.trace(max_tokens=1) as tracer:
        tracer.invoke(prompt)


def test_a_trace_without_prompt_and_invokes_says_what_to_write(model):
    with pytest.raises(ValueError, match=r"model\.trace\(prompt\)"), model.trace(max_tokens=1):
        pass


def test_a_forgotten_prompt_is_noted_on_the_error(model):
    with pytest.raises(OutsideBlockError) as caught, model.trace(max_tokens=1):
        logits = model.logits.save()
    assert "this trace has no prompt" in "".join(caught.value.__notes__)


def test_an_invoke_in_a_trace_with_a_prompt(model):
    with pytest.raises(ValueError, match=r"without a prompt"), model.trace(PROMPTS[0], max_tokens=1) as tracer:  # noqa: SIM117
        with tracer.invoke(PROMPTS[1]):
            logits = model.logits.save()
    with pytest.raises(ValueError, match=r"without a prompt"):
        tracer.invoke(PROMPTS[0])


def test_an_invoke_in_an_invoke(model):
    with pytest.raises(ValueError, match=r"side by side"), model.trace(max_tokens=1) as tracer:  # noqa: PT012, SIM117
        with tracer.invoke(PROMPTS[0]):
            with tracer.invoke(PROMPTS[1]):
                logits = model.logits.save()


def test_an_invoke_after_the_end_of_a_trace_that_shares_its_with(model, hf):
    with model.trace(max_tokens=1, temperature=0.0) as tracer, tracer.invoke(PROMPTS[0]):
        drawn = model.samples.save()
    assert int(drawn) == generation(hf, PROMPTS[0], 1).ids[0]
    with pytest.raises(OutsideBlockError, match="has ended"):
        tracer.invoke(PROMPTS[0])


def test_bad_settings_are_told_at_the_trace_and_at_the_invoke(model):
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        model.trace(temprature=1.0)
    with pytest.raises(ValueError, match="temperature"):
        model.trace(temperature=-1.0)
    with pytest.raises(ValueError, match="top_p"), model.trace(max_tokens=1) as tracer:
        tracer.invoke(PROMPTS[0], top_p=3.0)


def test_an_error_of_one_leaves_the_others_alone(model, hf):
    with pytest.raises(LookupError, match="second") as caught, model.trace(**GREEDY) as tracer:  # noqa: PT012
        with tracer.invoke(PROMPTS[0]) as first:
            kept = model.logits.save()
            shared = model.logits
            shared.save()
        with tracer.invoke(PROMPTS[1]) as second:
            shared = model.logits.save()
            raise LookupError("second")
        with tracer.invoke(PROMPTS[2]):
            raise ArithmeticError("third")
    expected = generation(hf, PROMPTS[0], STEPS)
    assert ids(first.result) == expected.ids
    torch.testing.assert_close(kept[0], expected.logits[0], **CLOSE)
    torch.testing.assert_close(first.saves["shared"][0], expected.logits[0], **CLOSE)
    for failed in (second, tracer):
        with pytest.raises(LookupError):
            failed.result
    assert caught.traceback[-1].path.name == "test_invokes.py"


async def test_async_names_are_lists_that_come(model, hf):
    async with model.trace(**GREEDY) as tracer:
        for prompt in PROMPTS:
            with tracer.invoke(prompt):
                logits = model.logits.save()
        async with tracer.invoke(PROMPTS[0], max_tokens=1):
            alone = model.samples.save()
    expected = [generation(hf, prompt, STEPS) for prompt in PROMPTS]
    torch.testing.assert_close(torch.cat(await logits), torch.stack([e.logits[0] for e in expected]), **CLOSE)
    assert int(await alone) == expected[0].ids[0]
    assert list(map(ids, await tracer.result)) == [*(e.ids for e in expected), expected[0].ids[:1]]
    saves = await tracer.saves
    assert list(saves) == ["logits", "alone"]
    assert len(await tracer.saves["logits"]) == 3
    assert logits.done()


async def test_tokens_of_all_arrive_as_they_are_made(model, hf):
    async with model.trace(**{**GREEDY, "max_tokens": 30}) as tracer:
        for prompt in PROMPTS:
            with tracer.invoke(prompt):
                for _ in tracer.iter[:]:
                    drawn = model.samples.save()
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    order: list[int] = []
    async for token in tracer.stream():
        assert token.index == len(seen[token.invoke])
        assert int(token.saves["drawn"]) == token.id
        seen[token.invoke].append(token.id)
        order.append(token.invoke)
    assert [seen[at] for at in range(3)] == [generation(hf, prompt, 30).ids for prompt in PROMPTS]
    assert len(set(order[30:60])) > 1, "one batch: nobody waits for another to end"
    streamed = [int(value) async for value in drawn.stream()]
    assert sorted(streamed) == sorted(token for tokens in seen.values() for token in tokens)


async def test_every_invoke_has_its_own_stream(model, hf):
    async with model.trace(**GREEDY) as tracer:
        with tracer.invoke(PROMPTS[0]) as first:
            pass
        with tracer.invoke(PROMPTS[1]) as second:
            pass
    assert [token.id async for token in second.stream()] == generation(hf, PROMPTS[1], STEPS).ids
    assert ids(await first.result) == generation(hf, PROMPTS[0], STEPS).ids


async def test_async_errors_surface_where_the_value_is_awaited(model, hf):
    async with model.trace(**GREEDY) as tracer:
        with tracer.invoke(PROMPTS[0]) as first:
            shared = model.logits.save()
            good = model.samples.save()
        with tracer.invoke(PROMPTS[1]):
            shared = model.logits.save()
            bad = (shared / 1).save()
            raise LookupError("of the second")
        with tracer.invoke(PROMPTS[2]):
            if False:
                never = save(1)
    assert int(await good) == generation(hf, PROMPTS[0], 1).ids[0]
    assert ids(await first.result) == generation(hf, PROMPTS[0], STEPS).ids
    for awaitable in (bad, shared, tracer.result, tracer.saves):
        with pytest.raises(LookupError, match="of the second"):
            await awaitable
    with pytest.raises(NotSavedError, match="never"):
        await never
    tokens = []
    with pytest.raises(LookupError):  # noqa: PT012
        async for token in tracer.stream():
            tokens.append(token)  # noqa: PERF401  an error ends it
    assert len([token for token in tokens if token.invoke != 1]) == 2 * STEPS


async def test_cancel_aborts_all(model):
    async with model.trace(**{**GREEDY, "max_tokens": 200}) as tracer:
        for prompt in PROMPTS:
            with tracer.invoke(prompt):
                pass
    async for _ in tracer.stream():
        break
    with pytest.raises(RunCancelledError):
        await tracer.result
    await drained(model)


async def test_leaving_the_stream_of_one_aborts_that_one(model, hf):
    async with model.trace(**{**GREEDY, "max_tokens": 60}) as tracer:
        with tracer.invoke(PROMPTS[0]) as first:
            pass
        with tracer.invoke(PROMPTS[1]) as second:
            pass
    async for _ in first.stream():
        break
    assert ids(await second.result) == generation(hf, PROMPTS[1], 60).ids
    with pytest.raises(RunCancelledError):
        await first.result


async def test_async_exception_of_the_outer_body_submits_nothing(model):
    with pytest.raises(KeyError):  # noqa: PT012
        async with model.trace(max_tokens=1) as tracer:
            with tracer.invoke(PROMPTS[0]):
                value = save(1)
            raise KeyError("of the body")
    with pytest.raises(OutsideBlockError):
        tracer.result


def test_many_invokes(model):
    with model.trace(max_tokens=1) as tracer:
        for number in range(100):
            with tracer.invoke([number + 4]):
                doubled = (2 * number).save()
    assert doubled == list(range(0, 200, 2))
