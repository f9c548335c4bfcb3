"""Steps without a waiting block run the model's own code and nothing of ours."""

from __future__ import annotations

from nnsight_async.testing.engine import drained

PROMPT = [5, 17, 101, 9, 33]


async def test_plain_requests_pass_no_reporting_module(model):
    before = await drained(model)
    await model.generate([PROMPT, PROMPT[:2]], max_tokens=8, ignore_eos=True)
    after = await drained(model)
    assert after["reports"] == before["reports"]


async def test_modules_are_as_before_when_blocks_have_gone(model):
    async with model.trace(PROMPT, max_tokens=3, ignore_eos=True) as tracer:
        for _ in tracer.iter[:]:
            model.model.layers[1].mlp.output
    await tracer.result
    between = await drained(model)
    await model.generate([PROMPT], max_tokens=8, ignore_eos=True)
    after = await drained(model)
    assert after["reports"] == between["reports"]
    assert after["entered"] == 0


async def test_a_block_that_has_all_it_wants_costs_its_later_steps_nothing(model):
    async def reports_of(steps: int) -> int:
        before = (await drained(model))["reports"]
        async with model.trace(PROMPT, max_tokens=steps, ignore_eos=True) as tracer:
            model.model.layers[1].output
        await tracer.result
        return (await drained(model))["reports"] - before

    once = await reports_of(1)
    assert once > 0
    assert await reports_of(12) == once
