"""What `model.stats()` has counted."""

from __future__ import annotations

import pytest

from nnsight_async import VLLM, RunCancelledError
from nnsight_async.testing.engine import HELD, drained
from tests.conftest import LONG
from tests.engine.rest import at_rest

PROMPT = [5, 17, 101]
LOGITS = 512 * 4  # bytes in a step
COUNTED = ("started", "finished", "failed", "cancelled", "aborted", "late_frames")
COUNTED += ("messages", "frames", "bytes", "damaged", "steps", "block_seconds", "strikes")


async def test_each_run_is_counted_once_by_how_it_ended(model: VLLM) -> None:
    before = await at_rest(model)

    async with model.trace(PROMPT, max_tokens=3, ignore_eos=True) as good:
        for _ in good.iter[:]:
            model.logits.save()
    await good.result
    async with model.trace(PROMPT, **LONG) as bad:
        1 / 0
    with pytest.raises(ZeroDivisionError):
        await bad.result
    async with model.trace(PROMPT, **LONG) as left:
        for _ in left.iter[:]:
            logits = model.logits.save()
    await anext(logits.stream())
    await left.cancel()
    with pytest.raises(RunCancelledError):
        await left.result
    await model.generate(PROMPT, max_tokens=1)

    after = await drained(model)
    assert set(after) == {
        *HELD,
        *COUNTED,
        "dropped_steps",
        "exchanges",
        "graphs",
        "ops",
        "planned",
        "reports",
        "replays",
        "edits",
        "constants",
        "constant_bytes",
        "runner",
    }
    grown = {name: after[name] - before[name] for name in COUNTED}
    assert (grown["started"], grown["finished"], grown["failed"], grown["cancelled"]) == (4, 2, 1, 1)
    assert grown["aborted"] == 2
    assert grown["damaged"] == grown["strikes"] == 0
    assert grown["frames"] >= grown["messages"]
    assert grown["steps"] >= 5
    assert grown["messages"] >= 5
    assert grown["bytes"] > 4 * LOGITS
    assert grown["block_seconds"] > 0


async def test_plain_requests_have_no_part_in_what_blocks_take(model: VLLM) -> None:
    before = await at_rest(model)
    await model.generate([PROMPT, PROMPT], max_tokens=8, ignore_eos=True)
    after = await drained(model)

    for name in ("messages", "bytes", "steps", "block_seconds"):
        assert after[name] == before[name], name
