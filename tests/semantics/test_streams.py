"""Tokens and values as they come, and the ways of leaving before the end."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import anyio.lowlevel
import pytest
import torch
import uvloop

from nnsight_async import NotSavedError, RunCancelledError, Saved, save
from nnsight_async.testing.engine import drained
from nnsight_async.testing.oracle import generation

PROMPT = [5, 17, 101, 9, 33, 250, 77]
STEPS = 6
GREEDY = {"max_tokens": STEPS, "temperature": 0.0, "ignore_eos": True}
LONG = {"max_tokens": 200, "temperature": 0.0, "ignore_eos": True}
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="session")
def expected(hf: Any) -> Any:
    return generation(hf, PROMPT, STEPS)


def reads_logits(model: Any, tracer: Any) -> None:
    for _ in tracer.iter[:]:
        tracer.save(model.logits, "logits")


# -- what comes --------------------------------------------------------------------------------------------------------


async def test_each_token_brings_the_values_of_its_step(model, expected):
    async with model.trace(PROMPT, **GREEDY) as tracer:
        for step in tracer.iter[:]:
            hidden = model.model.layers[2].resid_post.save()
            logits = model.logits.save()
            number = save(step)
    tokens = [token async for token in tracer.stream()]
    assert [token.id for token in tokens] == expected.ids
    assert [token.index for token in tokens] == list(range(STEPS))
    assert [token.saves["number"] for token in tokens] == list(range(STEPS))
    torch.testing.assert_close(torch.cat([token.saves["hidden"] for token in tokens]), expected.streams[2], **CLOSE)
    torch.testing.assert_close(torch.cat([token.saves["logits"] for token in tokens]), expected.logits, **CLOSE)
    assert [token.finish_reason for token in tokens] == [None] * (STEPS - 1) + ["length"]
    again = [token async for token in tracer.stream()]
    assert [token.id for token in again] == expected.ids


async def test_a_saved_value_is_awaited_again_and_again_by_several_tasks(model, expected):
    async with model.trace(PROMPT, **GREEDY) as tracer:
        for _ in tracer.iter[:]:
            logits = model.logits.save()

    async def wait() -> torch.Tensor:
        return await logits

    assert isinstance(logits, Saved)
    values = [await logits, await logits, *await asyncio.gather(*(wait() for _ in range(8)))]
    for value in values:
        torch.testing.assert_close(value[0], expected.logits[-1], **CLOSE)
    assert logits.done()
    steps = [value async for value in logits.stream()]
    torch.testing.assert_close(torch.cat(steps), expected.logits, **CLOSE)
    saves = await tracer.saves
    assert list(saves) == ["logits"]
    assert torch.equal(saves["logits"], values[0])


async def test_a_prefill_value_is_there_before_the_generation_ends(model, expected):
    async with model.trace(PROMPT, **LONG) as tracer:
        logits = model.logits.save()
    torch.testing.assert_close((await logits)[0], expected.logits[0], **CLOSE)
    async for token in tracer.stream():
        assert token.finish_reason is None
        break
    await drained(model)


@pytest.mark.backends("vllm")
async def test_the_result_is_vllms_own_with_the_values(model, expected):
    from vllm import RequestOutput

    async with model.trace(PROMPT, logprobs=2, **GREEDY) as tracer:
        logits = model.logits.save()
    result = await tracer.result
    assert isinstance(result, RequestOutput)
    assert result.finished
    assert result.prompt_token_ids == PROMPT
    assert list(result.outputs[0].token_ids) == expected.ids
    assert result.outputs[0].finish_reason == "length"
    assert torch.equal(result.saves["logits"], await logits)
    assert result is await tracer.result


async def test_logprobs_of_tokens(model, expected):
    async with model.run(PROMPT, reads_logits, logprobs=3, **GREEDY) as run:
        tokens = [token async for token in run.stream()]
        result = await run.result
    oracle = expected.logits.log_softmax(-1)
    for token in tokens:
        assert token.logprob == pytest.approx(float(oracle[token.index, token.id]), abs=1e-4)
    assert len(result.outputs[0].logprobs) == STEPS
    total = sum(token.logprob for token in tokens)
    assert result.outputs[0].cumulative_logprob == pytest.approx(total, abs=1e-4)


async def test_text_of_tokens_is_the_text_of_the_result(model):
    wanted = "naïve 猫 🙂 fin"
    ids = model.tokenizer(wanted, add_special_tokens=False)["input_ids"]
    async with model.trace(PROMPT, max_tokens=len(ids), temperature=0.0, ignore_eos=True) as tracer:
        for step in tracer.iter[:]:
            model.samples[:] = ids[step]
    texts = [token.text async for token in tracer.stream()]
    result = await tracer.result
    assert len(texts) == len(ids)
    assert "".join(texts) == result.outputs[0].text == wanted
    assert "🙂" in texts


async def test_every_token_has_its_own_text_under_load(model):
    async def texts(number: int) -> list[Any]:
        async with model.run([number + 4, 9, 8], reads_logits, max_tokens=24, temperature=0.0, ignore_eos=True) as run:
            return [token async for token in run.stream()]

    for tokens in await asyncio.gather(*map(texts, range(24))):
        assert [token.index for token in tokens] == list(range(24))
        whole = model.tokenizer.decode([token.id for token in tokens]).rstrip(
            "\ufffd"
        )  # a character that is not complete
        assert "".join(token.text for token in tokens) == whole
        for token in tokens:
            alone = model.tokenizer.decode([token.id])
            assert token.text == alone or "\ufffd" in alone or "\ufffd" in token.text


async def test_a_list_saved_once_and_a_dict_that_grows(model, expected):
    async with model.trace(PROMPT, **GREEDY) as tracer:
        kept, named = save([]), save({})
        for step in tracer.iter[:]:
            kept.append(model.logits)
            named[step] = step * 2
    tokens = [token async for token in tracer.stream()]
    assert [len(token.saves["kept"]) for token in tokens] == list(range(1, STEPS + 1))
    assert await named == {step: step * 2 for step in range(STEPS)}
    torch.testing.assert_close(torch.cat(await kept), expected.logits, **CLOSE)


async def test_a_loop_that_outruns_the_generation_and_what_follows_it(model):
    async with model.trace(PROMPT, **GREEDY) as tracer:
        count = 0
        for _ in tracer.iter[0:1000]:
            count += 1
        count.save()
        after = save("reached")
    assert await count == STEPS
    assert await after == "reached"
    assert (await tracer.result).saves == {"count": STEPS, "after": "reached"}


async def test_steps_by_list_slice_and_number(model, expected):
    async with model.trace(PROMPT, **GREEDY) as tracer:
        seen, logits = save([]), save([])
        for step in tracer.iter[1]:
            seen.append(step)
        for step in tracer.iter[[2, 4]]:
            seen.append(step)
            logits.append(model.logits)
        for step in tracer.iter[5:]:
            seen.append(step)
    assert await seen == [1, 2, 4, 5]
    torch.testing.assert_close(torch.cat(await logits), expected.logits[[2, 4]], **CLOSE)


# -- the end, asked for by the block -----------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"min_tokens": 100}], ids=["ignore_eos", "min_tokens"])
async def test_stop_ends_the_request_at_its_step(model, expected, more):
    async with model.trace(PROMPT, **LONG, **more) as tracer:
        kept = save([])
        for step in tracer.iter[:]:
            kept.append(model.logits)
            if step == 2:
                tracer.stop()
    tokens = [token async for token in tracer.stream()]
    result = await tracer.result
    assert [token.id for token in tokens] == list(result.outputs[0].token_ids) == expected.ids[:3]
    assert tokens[-1].finish_reason == result.outputs[0].finish_reason == "stop"
    assert result.outputs[0].text == "".join(token.text for token in tokens)
    torch.testing.assert_close(torch.cat(await kept), expected.logits[:3], **CLOSE)
    await drained(model)


# -- leaving early -----------------------------------------------------------------------------------------------------


async def traced(model: Any) -> Any:
    async with model.trace(PROMPT, **LONG) as tracer:
        for _ in tracer.iter[:]:
            logits = model.logits.save()
    return tracer


async def leave_by_break(tracer: Any) -> None:
    async for _ in tracer.stream():
        break


async def leave_by_context(tracer: Any) -> None:
    async with tracer.stream() as stream:
        await anext(stream)


async def leave_by_aclose(tracer: Any) -> None:
    stream = tracer.stream()
    await anext(stream)
    await stream.aclose()


async def leave_by_cancel(tracer: Any) -> None:
    await tracer.cancel()
    await tracer.cancel()


async def leave_by_exception(tracer: Any) -> None:
    with pytest.raises(KeyError):  # noqa: PT012
        async for token in tracer.stream():
            raise KeyError(token.index)


async def leave_by_timeout(tracer: Any) -> None:
    with pytest.raises(TimeoutError):  # noqa: PT012
        async with asyncio.timeout(0.05):
            async for _ in tracer.stream():
                await asyncio.Event().wait()


async def leave_by_task(tracer: Any) -> None:
    begun = asyncio.Event()

    async def consume() -> None:
        async for _ in tracer.stream():
            begun.set()

    task = asyncio.create_task(consume())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_group(tracer: Any) -> None:
    async def consume() -> None:
        async for _ in tracer.stream():
            pass

    async def fail() -> None:
        await tracer.saves["logits"].stream().__anext__()
        raise KeyError("elsewhere")

    with pytest.raises(ExceptionGroup):  # noqa: PT012
        async with asyncio.TaskGroup() as group:
            group.create_task(consume())
            group.create_task(fail())


async def leave_by_a_timeout_of_the_result(tracer: Any) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(tracer.result, 0.05)


async def leave_by_a_timeout_of_a_value(tracer: Any) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await tracer.saves["logits"]


async def leave_by_a_cancelled_wait_for_all_values(tracer: Any) -> None:
    task = asyncio.ensure_future(tracer.saves)
    await anext(aiter(tracer.saves["logits"].stream()))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_a_break_among_values(tracer: Any) -> None:
    async for _ in tracer.saves["logits"].stream():
        break


async def leave_by_an_anyio_scope(tracer: Any) -> None:
    with anyio.move_on_after(0.05):
        async for _ in tracer.saves["logits"].stream():
            await anyio.lowlevel.checkpoint()


WAYS = [
    leave_by_break,
    leave_by_context,
    leave_by_aclose,
    leave_by_cancel,
    leave_by_exception,
    leave_by_timeout,
    leave_by_task,
    leave_by_group,
    leave_by_a_timeout_of_the_result,
    leave_by_a_timeout_of_a_value,
    leave_by_a_cancelled_wait_for_all_values,
    leave_by_a_break_among_values,
    leave_by_an_anyio_scope,
]


@pytest.mark.parametrize("leave", WAYS, ids=lambda way: way.__name__.removeprefix("leave_by_"))
async def test_leaving_early_frees_the_worker_at_once(model, leave):
    async with asyncio.timeout(20):
        tracer = await traced(model)
        await leave(tracer)
        await drained(model)
        for waited in (tracer.result, tracer.saves, tracer.saves["logits"]):
            with pytest.raises(RunCancelledError):
                await waited


async def test_one_of_several_readers_who_leaves_aborts_nothing(model, expected):
    async with model.trace(PROMPT, **LONG) as tracer:  # which goes on while they leave
        for _ in tracer.iter[:]:
            logits = model.logits.save()
    waiting = asyncio.ensure_future(tracer.result)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(logits, 0)
    async for _ in logits.stream():
        break
    with pytest.raises(TimeoutError):
        await asyncio.to_thread(logits.result, 0)
    ids = list((await waiting).outputs[0].token_ids)
    assert (ids[:STEPS], len(ids)) == (expected.ids, LONG["max_tokens"])


async def test_a_shielded_wait_aborts_nothing(model, expected):
    async with model.trace(PROMPT, **GREEDY) as tracer:
        logits = model.logits.save()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(tracer.result), 0)
    assert list((await tracer.result).outputs[0].token_ids) == expected.ids


async def test_a_reader_of_one_invoke_leaves_the_others_alone(model, expected):
    async with model.trace(**LONG) as tracer:
        with tracer.invoke(PROMPT, max_tokens=STEPS):
            first = model.logits.save()
        with tracer.invoke(PROMPT):
            for _ in tracer.iter[:]:
                second = model.logits.argmax().save()
    waiting = asyncio.ensure_future(first)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(second, 0.05)
    torch.testing.assert_close(await waiting, expected.logits[:1], **CLOSE)
    with pytest.raises(RunCancelledError):
        await second
    await drained(model)


async def test_leaving_the_function_form(model):
    async with model.run(PROMPT, reads_logits, **LONG) as run:
        await anext(run.stream())
    await drained(model)
    with pytest.raises(RunCancelledError):
        await run.result


async def test_cancelled_before_it_began(model):
    runs = [await traced(model) for _ in range(8)]
    for tracer in runs:
        await tracer.cancel()
    await drained(model)


async def test_a_neighbour_of_those_who_leave(model, expected):
    async with model.run(PROMPT, reads_logits, **GREEDY) as stays:
        for _ in range(4):
            await leave_by_break(await traced(model))
        assert list((await stays.result).outputs[0].token_ids) == expected.ids


async def test_a_slow_consumer_holds_up_nobody(model, expected):
    slow = await traced(model)
    stream = slow.stream()
    await anext(stream)
    async with model.run(PROMPT, reads_logits, **GREEDY) as quick:
        assert list((await quick.result).outputs[0].token_ids) == expected.ids
    rest = [token async for token in stream]
    assert len(rest) == LONG["max_tokens"] - 1


# -- loops and threads -------------------------------------------------------------------------------------------------


async def traced_ids(model: Any) -> list[int]:
    async with model.trace(PROMPT, **GREEDY) as tracer:
        logits = model.logits.save()
    ids = [token.id async for token in tracer.stream()]
    assert (await logits).shape == (1, 512)
    return ids


def test_two_event_loops_one_after_the_other(model, expected):
    assert asyncio.run(traced_ids(model)) == expected.ids
    assert asyncio.run(traced_ids(model)) == expected.ids


def test_uvloop(model, expected):
    assert uvloop.run(traced_ids(model)) == expected.ids


def test_threads_with_traces_and_loops_at_the_same_time(model, expected):
    found: dict[int, Any] = {}

    def sync(number: int) -> None:
        with model.trace(PROMPT, **GREEDY) as tracer:
            logits = model.logits.save()
        found[number] = (list(tracer.result.outputs[0].token_ids), logits)

    def with_a_loop(number: int) -> None:
        found[number] = (asyncio.run(traced_ids(model)), None)

    threads = [threading.Thread(target=sync, args=(number,)) for number in range(4)]
    threads += [threading.Thread(target=with_a_loop, args=(number,)) for number in range(4, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(found) == list(range(6))
    for ids, logits in found.values():
        assert ids == expected.ids
        if logits is not None:
            torch.testing.assert_close(logits[0], expected.logits[0], **CLOSE)


async def test_a_name_without_a_value(model):
    async with model.run(PROMPT, reads_logits, **GREEDY) as run:
        with pytest.raises(NotSavedError, match="it saved logits"):
            await run.saves["other"]
        await run.result
        with pytest.raises(KeyError):
            run.saves["other"]


async def test_nothing_is_left(model):
    await drained(model)
