"""With prefix caching on, nobody reads keys and values that were computed under other edits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nnsight_async import VLLM
from nnsight_async.testing.engine import drained
from nnsight_async.testing.oracle import generation
from tests.semantics.conftest import build

PROMPT = [*range(20, 70), 5, 17, 101, 9]
SAMPLING = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
BLOCK = 32
VECTOR = 3 * torch.randn(128, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def caching() -> Iterator[VLLM]:
    model = build("llama", enable_prefix_caching=True, block_size=BLOCK)
    yield model
    model.close()


@pytest.fixture(scope="module")
def wanted(hf: Any) -> dict[float, list[int]]:
    """What is drawn when so much of the vector is added."""
    return {
        scale: generation(hf, PROMPT, 4, {1: lambda hidden, scale=scale: hidden + scale * VECTOR}).ids
        for scale in (0.0, 1.0, -1.0)
    }


def adds(scale: float) -> Any:
    def probe(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            model.model.layers[1].output[0][:] += scale * VECTOR

    return probe


async def request(model: VLLM, **more: Any) -> tuple[list[int], int]:
    """What was drawn, and how many tokens of the prompt were read from the cache."""
    (output,) = await model.generate(PROMPT, **SAMPLING, **more)
    return list(output.outputs[0].token_ids), output.num_cached_tokens


async def test_each_set_of_edits_has_prefixes_of_its_own(caching, wanted):
    assert len({tuple(ids) for ids in wanted.values()}) == 3
    hit = len(PROMPT) // BLOCK * BLOCK
    assert await request(caching) == (wanted[0.0], 0)
    assert await request(caching) == (wanted[0.0], hit)  # plain traffic reads its own

    await caching.edit(adds(1.0), name="plus", rowwise=True)
    await caching.edit(adds(-1.0), name="minus", rowwise=True)
    assert await request(caching, edits=["plus"]) == (wanted[1.0], 0)
    assert await request(caching, edits=["plus"]) == (wanted[1.0], hit)
    assert await request(caching, edits=["minus"]) == (wanted[-1.0], 0)
    assert await request(caching, edits=["minus"]) == (wanted[-1.0], hit)
    assert await request(caching, edits=["plus", "minus"]) == (wanted[0.0], 0)
    assert await request(caching, edits=["minus", "plus"]) == (wanted[0.0], hit)  # the same set
    assert await request(caching, edits=[]) == (wanted[0.0], hit)

    await caching.clear_edits()
    await caching.edit(adds(1.0), name="minus", rowwise=True)  # another edit under a name that was in use
    assert await request(caching) == (wanted[1.0], 0)
    await caching.clear_edits()
    assert await request(caching) == (wanted[0.0], hit)
    await drained(caching)


async def test_an_edit_that_is_not_rowwise_sees_its_whole_prompt(caching, wanted):
    def centres(model: Any, tracer: Any) -> None:
        for step in tracer.iter[:]:
            output = model.model.layers[1].output[0]
            if step == 0:
                tracer.save(output.shape[0], "rows")

    await caching.edit(centres)
    for _ in range(2):
        (output,) = await caching.generate(PROMPT, **SAMPLING)
        assert (output.num_cached_tokens, output.saves["rows"]) == (0, len(PROMPT))
    await caching.clear_edits()
    assert (await request(caching))[0] == wanted[0.0]


async def test_what_a_failing_edit_leaves_is_read_by_nobody(caching, wanted, tmp_path):
    broken = tmp_path / "broken"
    broken.touch()

    def adds_or_fails(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            if os.path.exists(broken):  # noqa: PTH110
                raise RuntimeError("not now")
            model.model.layers[1].output[0][:] += VECTOR

    await caching.edit(adds_or_fails, rowwise=True)
    with pytest.raises(RuntimeError, match="not now"):
        await caching.generate(PROMPT, **SAMPLING)
    broken.unlink()
    hit = len(PROMPT) // BLOCK * BLOCK
    assert await request(caching) == (wanted[1.0], 0)
    assert await request(caching) == (wanted[1.0], hit)
    await caching.clear_edits()
    assert (await request(caching))[0] == wanted[0.0]
    await drained(caching)


async def test_a_traced_request_reads_nothing_that_is_cached(caching, wanted):
    await caching.edit(adds(1.0), rowwise=True)
    for _ in range(2):
        async with caching.trace(PROMPT, **SAMPLING) as tracer:
            rows = caching.model.layers[0].output[0].save()
        result = await tracer.result
        assert list(result.outputs[0].token_ids) == wanted[1.0]
        assert (result.num_cached_tokens, (await rows).shape[0]) == (0, len(PROMPT))
    await caching.clear_edits()


async def test_requests_from_elsewhere_too(caching, wanted):
    import asyncio

    from vllm import SamplingParams

    async def own(prompt: Any) -> tuple[list[int], int]:
        params = SamplingParams(**SAMPLING)

        async def last() -> Any:
            outputs = [output async for output in caching.vllm_entrypoint.generate(prompt, params, f"own-{id(params)}")]
            return outputs[-1]

        output = await asyncio.wrap_future(caching._engine.call(last()))
        return list(output.outputs[0].token_ids), output.num_cached_tokens

    hit = len(PROMPT) // BLOCK * BLOCK
    await caching.edit(adds(1.0), rowwise=True)
    assert await own({"prompt_token_ids": PROMPT}) == (wanted[1.0], 0)
    assert await own(PROMPT) == (wanted[1.0], hit)
    assert await request(caching) == (wanted[1.0], hit)
    assert await own({"prompt_token_ids": PROMPT, "cache_salt": "another"}) == (wanted[1.0], 0)
    await caching.clear_edits()
    assert (await own(PROMPT))[0] == wanted[0.0]
