"""Declared operations do what a forward hook of transformers with the same arithmetic does, for their request alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from nnsight_async import VLLM, LocationError, NotASiteError, ShapeError, UnsupportedError, save
from nnsight_async.testing.engine import drained
from nnsight_async.testing.oracle import Generation, generation
from tests.semantics.conftest import build

pytestmark = pytest.mark.backends("vllm")

PROMPT = [5, 17, 101, 9, 33, 250, 77]
STEPS = 5
GREEDY: dict[str, Any] = {"max_tokens": STEPS, "temperature": 0.0, "ignore_eos": True}
WIDTH = 128
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
VECTOR = 2 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(1))
OTHER = 2 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(2))
UNIT = VECTOR / VECTOR.norm()


def without(stream: torch.Tensor, part: float = 1.0) -> torch.Tensor:
    return stream - part * (stream @ UNIT)[..., None] * UNIT


def clamped(stream: torch.Tensor, low: float | None = 0.5, high: float = 1.0) -> torch.Tensor:
    along = stream @ UNIT
    return stream + (along.clamp(low, high) - along)[..., None] * UNIT


OPERATIONS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "steer": (lambda model, at: model.steer(at, VECTOR, scale=1.5), lambda x: x + 1.5 * VECTOR),
    "ablate": (lambda model, at: model.ablate(at, VECTOR), without),
    "ablate half": (lambda model, at: model.ablate(at, VECTOR, scale=0.5), lambda x: without(x, 0.5)),
    "clamp": (lambda model, at: model.clamp(at, VECTOR, min=0.5, max=1.0), clamped),
    "clamp from above": (lambda model, at: model.clamp(at, VECTOR, max=-3), lambda x: clamped(x, None, -3.0)),
    "replace": (lambda model, at: model.replace(at, VECTOR), lambda x: VECTOR.expand_as(x)),
}


async def drawn(model: VLLM, ops: Any, prompt: list[int] = PROMPT, **more: Any) -> list[int]:
    (output,) = await model.generate(prompt, ops=ops, **{**GREEDY, **more})
    return list(output.outputs[0].token_ids)


def traced(model: VLLM, ops: Any, **more: Any) -> tuple[list[int], torch.Tensor]:
    """What was drawn, and the logits of every step."""
    with model.trace(PROMPT, ops=ops, **{**GREEDY, **more}) as tracer:
        logits = save([])
        for _ in tracer.iter[:]:
            logits.append(model.logits)
    return list(tracer.result.outputs[0].token_ids), torch.cat(logits)


def assert_generated(got: tuple[list[int], torch.Tensor], expected: Generation) -> None:
    assert got[0] == expected.ids
    torch.testing.assert_close(got[1], expected.logits, **CLOSE)


@pytest.mark.parametrize("name", OPERATIONS)
def test_declared_operations_do_what_they_say(model: VLLM, hf: Any, name: str) -> None:
    declare, edit = OPERATIONS[name]
    expected = generation(hf, PROMPT, STEPS, {1: edit})
    assert expected.ids != generation(hf, PROMPT, STEPS).ids

    assert_generated(traced(model, [declare(model, model.model.layers[1])]), expected)


def test_a_layer_has_a_number_and_vectors_come_as_they_are(model: VLLM, hf: Any) -> None:
    expected = generation(hf, PROMPT, STEPS, {3: lambda x: x + VECTOR})

    assert_generated(traced(model, [model.steer(-1, VECTOR.double().numpy())]), expected)
    assert_generated(traced(model, [model.steer(3, np.asarray(VECTOR))]), expected)
    halves = VECTOR.bfloat16()
    rounded = generation(hf, PROMPT, STEPS, {3: lambda x: x + halves.float()})
    assert_generated(traced(model, (model.steer(3, halves),)), rounded)


@pytest.mark.parametrize(
    ("positions", "chosen"),
    [
        ("prompt", range(7)),
        ("generated", range(7, 11)),
        (0, [0]),
        (-1, [6]),
        (8, [8]),
        ([0, 2, -2], [0, 2, 5]),
        (range(3), [0, 1, 2]),
        (slice(1, None, 2), [1, 3, 5, 7, 9]),
        (slice(None, -1), range(6)),
        (slice(-2, None), range(5, 11)),
        (slice(9, 500), [9, 10]),
    ],
    ids=str,
)
def test_declared_positions(model: VLLM, hf: Any, positions: Any, chosen: Any) -> None:
    def edit(stream: torch.Tensor) -> torch.Tensor:
        rows = [row for row in chosen if row < stream.shape[1]]
        return torch.index_add(stream, 1, torch.tensor(rows, dtype=torch.long), VECTOR.expand(1, len(rows), WIDTH))

    ops = [model.steer(1, VECTOR, positions=positions)]
    assert_generated(traced(model, ops), generation(hf, PROMPT, STEPS, {1: edit}))


def test_declared_operations_act_in_their_order(model: VLLM, hf: Any) -> None:
    def first(stream: torch.Tensor) -> torch.Tensor:
        steered = stream + OTHER
        return without(steered) + 0.25 * VECTOR

    def last(stream: torch.Tensor) -> torch.Tensor:
        stream = stream.clone()
        stream[:, 1:3] = OTHER
        return clamped(stream)

    def steps(order: int) -> list[Any]:
        ops = [model.steer(0, OTHER), model.ablate(0, VECTOR), model.steer(0, VECTOR, scale=0.25)]
        return [*ops[::order], model.replace(2, OTHER, positions=[1, 2]), model.clamp(2, VECTOR, min=0.5, max=1)]

    expected = generation(hf, PROMPT, STEPS, {0: first, 2: last})
    assert_generated(traced(model, steps(1)), expected)
    assert not torch.allclose(traced(model, steps(-1))[1][0], expected.logits[0], **CLOSE)


def test_a_block_sees_declared_operations_and_goes_on_from_them(model: VLLM, hf: Any) -> None:
    expected = generation(hf, PROMPT, STEPS, {1: lambda x: 0.5 * (x + VECTOR)})
    layer = model.model.layers[1]

    with model.trace(PROMPT, ops=[model.steer(layer, VECTOR)], **GREEDY) as tracer:
        streams, logits = save([]), save([])
        for _ in tracer.iter[:]:
            layer.resid_post *= 0.5
            streams.append(layer.resid_post)
            logits.append(model.logits)

    assert_generated((list(tracer.result.outputs[0].token_ids), torch.cat(logits)), expected)
    torch.testing.assert_close(torch.cat(streams), expected.streams[1], **CLOSE)


async def test_declared_in_one_batch_each_request_has_its_own(model: VLLM, hf: Any) -> None:
    vectors = 2 * torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(4))
    prompts = [[token + number for token in PROMPT[: 2 + number % 5]] for number in range(24)]

    def edit(number: int) -> Any:
        """Every third request is plain, every fourth of the others acts on generated tokens alone."""
        if number % 3 == 0:
            return None
        vector, start = vectors[number % 12], len(prompts[number]) if number % 4 == 0 else 0
        return lambda x: torch.cat([x[:, :start], x[:, start:] + vector], dim=1)

    def ops(number: int) -> Any:
        if number % 3 == 0:
            return None
        return [model.steer(1, vectors[number % 12], positions="generated" if number % 4 == 0 else None)]

    async def later(number: int) -> list[int]:
        await asyncio.sleep(0.005 * (number % 4))
        return await drawn(model, ops(number), prompts[number])

    together = await asyncio.gather(*map(later, range(24)))

    for number, ids in enumerate(together):
        edits = None if edit(number) is None else {1: edit(number)}
        assert ids == generation(hf, prompts[number], STEPS, edits).ids, number
    counts = await drained(model)
    assert counts["entered"] == 0


async def test_declared_for_every_form_of_a_request(model: VLLM, hf: Any) -> None:
    expected = generation(hf, PROMPT, STEPS, {1: lambda x: x + VECTOR}).ids
    other = generation(hf, PROMPT, STEPS, {1: lambda x: x - VECTOR}).ids
    ops = [model.steer(1, VECTOR)]

    def probe(model: Any, tracer: Any) -> None:
        tracer.save(model.samples, "first")

    ran = await model.run(PROMPT, probe, ops=ops, **GREEDY)
    assert list(ran.outputs[0].token_ids) == expected
    mapped = [result async for result in model.map([PROMPT] * 3, probe, ops=ops, progress=False, **GREEDY)]
    assert [list(result.output.outputs[0].token_ids) for result in mapped] == [expected] * 3
    async with model.trace(ops=ops, **GREEDY) as tracer:
        async with tracer.invoke(PROMPT) as first:
            model.logits
        async with tracer.invoke(PROMPT, ops=[model.steer(1, VECTOR, scale=-1)]) as second:
            model.logits
    assert list((await first.result).outputs[0].token_ids) == expected
    assert list((await second.result).outputs[0].token_ids) == other
    (output,) = await model.generate(PROMPT, ops=ops, n=2, **{**GREEDY, "temperature": 1e-5})
    assert [list(each.token_ids) for each in output.outputs] == [expected] * 2


async def test_captures_come_with_every_token(model: VLLM, hf: Any) -> None:
    expected = generation(hf, PROMPT, STEPS, {1: lambda x: x + VECTOR})
    ops = [model.capture(2, "later"), model.steer(1, VECTOR), model.capture(model.model.layers[1], "here")]

    async with model.trace(PROMPT, ops=ops, **GREEDY) as tracer:
        for _ in tracer.iter[:]:
            tracer.save(model.logits, "logits")
    steps = [token.saves async for token in tracer.stream()]

    for name, layer in (("here", 1), ("later", 2)):
        torch.testing.assert_close(torch.cat([saves[name] for saves in steps]), expected.streams[layer], **CLOSE)
        assert torch.equal(await tracer.saves[name], steps[-1][name])
    torch.testing.assert_close(torch.cat([saves["logits"] for saves in steps]), expected.logits, **CLOSE)
    (output,) = await model.generate(PROMPT, ops=[model.capture(2, "stream")], **GREEDY)
    assert output.saves["stream"].shape == (1, WIDTH)


async def test_requests_with_declared_operations_are_counted(model: VLLM) -> None:
    before = (await model.stats())["ops"]
    await drawn(model, [model.steer(1, VECTOR), model.ablate(2, VECTOR)])
    await drawn(model, None)
    await drawn(model, [])
    assert (await model.stats())["ops"] == before + 1


async def test_declared_operations_of_edits_come_before_those_of_requests(model: VLLM, hf: Any) -> None:
    ablated = [model.ablate(1, VECTOR)]
    both = generation(hf, PROMPT, STEPS, {1: lambda x: without(x + OTHER)}).ids
    steered = generation(hf, PROMPT, STEPS, {1: lambda x: x + OTHER}).ids
    alone = generation(hf, PROMPT, STEPS, {1: without}).ids

    edit = await model.edit(ops=[model.steer(1, OTHER)], name="calm")
    try:
        assert edit.name == "calm"
        assert "calm" in repr(edit)
        assert await drawn(model, None) == steered
        assert await drawn(model, ablated, edits=["calm"]) == both
        assert await drawn(model, ablated, edits=[]) == alone
        with pytest.raises(ValueError, match="'calm' is installed"):
            await model.edit(ops=ablated, name="calm")
    finally:
        await edit.clear()
    assert await drawn(model, ablated) == alone
    assert await drawn(model, None) == generation(hf, PROMPT, STEPS).ids


async def test_an_edit_that_is_cleared_ends_for_requests_that_go_on(model: VLLM, hf: Any) -> None:
    def probe(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            before = model.model.layers[1].output
            tracer.save([before[0], before[1]], "pair")

    edit = await model.edit(ops=[model.replace(1, VECTOR)])
    async with model.run(PROMPT, probe, **{**GREEDY, "max_tokens": 4000}) as run, run.stream() as tokens:
        replaced, edit_is_on = 0, True
        async for token in tokens:
            hidden, residual = token.saves["pair"]
            if not torch.equal(residual, VECTOR.expand_as(residual)):
                assert not edit_is_on
                break
            assert torch.equal(hidden, torch.zeros_like(hidden))
            replaced += 1
            if replaced == 3:
                await edit.clear()
                edit_is_on = False
    assert replaced >= 3
    await drained(model)


@pytest.mark.parametrize(
    ("ops", "error"), [([], ValueError), (["steer"], TypeError), (lambda m: [m.capture(1, "a")], TypeError)]
)
async def test_what_an_edit_cannot_be_made_of_is_refused(model: VLLM, ops: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        await model.edit(ops=ops(model) if callable(ops) else ops)
    with pytest.raises(TypeError, match="not both"):
        await model.edit(lambda model, tracer: None, ops=[model.steer(1, VECTOR)])
    assert not model.edits


@pytest.mark.parametrize(
    ("declare", "error", "message"),
    [
        (lambda m: m.steer(1, torch.zeros(64)), ShapeError, r"128.*\(64,\)"),
        (lambda m: m.steer(1, torch.zeros(2, 128)), ShapeError, r"128.*\(2, 128\)"),
        (lambda m: m.steer(1, torch.zeros(128, dtype=torch.int32)), TypeError, "floats"),
        (lambda m: m.steer(1, [0.0] * 128), TypeError, "a tensor or an array"),
        (lambda m: m.steer(1, VECTOR * torch.inf), ValueError, "not finite"),
        (lambda m: m.steer(1, VECTOR.double() * 1e300), ValueError, "not finite"),
        (lambda m: m.steer(1, VECTOR, scale="1"), TypeError, "scale='1'"),
        (lambda m: m.steer(1, VECTOR, scale=float("nan")), ValueError, "finite"),
        (lambda m: m.steer(1, VECTOR, scale=10**400), ValueError, "finite"),
        (lambda m: m.steer(1, VECTOR, positions=1 << 70), ValueError, "as long as that"),
        (lambda m: m.ablate(1, torch.zeros(128)), ValueError, "zeros"),
        (lambda m: m.clamp(1, VECTOR), ValueError, "min= or max="),
        (lambda m: m.clamp(1, VECTOR, min=2, max=1), ValueError, "above"),
        (lambda m: m.steer(4, VECTOR), LocationError, "4 items"),
        (lambda m: m.steer("1", VECTOR), TypeError, "its number"),
        (lambda m: m.steer(m.model.layers[1].mlp, VECTOR), LocationError, "not a layer"),
        (lambda m: m.steer(1, VECTOR, positions="last"), TypeError, '"generated"'),
        (lambda m: m.steer(1, VECTOR, positions=True), TypeError, "positions=True"),
        (lambda m: m.steer(1, VECTOR, positions=[]), ValueError, "nothing"),
        (lambda m: m.steer(1, VECTOR, positions=[1.5]), TypeError, "whole numbers"),
        (lambda m: m.steer(1, VECTOR, positions=slice(None, None, -1)), ValueError, "step"),
        (lambda m: m.capture(1, ""), TypeError, "a name"),
    ],
)
def test_what_cannot_be_declared_is_refused_at_its_line(model: VLLM, declare: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        declare(model)


def test_ops_takes_declared_operations_alone(model: VLLM) -> None:
    for given in (model.steer(1, VECTOR), ["steer"], "steer"):
        with pytest.raises(TypeError, match=r"model\.steer"):
            model.trace(PROMPT, ops=given)
    with pytest.raises(ValueError, match="two captures named 'a'"):
        model.trace(PROMPT, ops=[model.capture(1, "a"), model.capture(2, "a")])


async def test_a_position_that_does_not_exist_fails_its_request_alone(model: VLLM, hf: Any) -> None:
    good = [model.steer(1, VECTOR)]

    async def bad(positions: Any) -> None:
        with pytest.raises(ValueError, match="prompt has 7 tokens"):
            await drawn(model, [*good, model.steer(2, OTHER, positions=positions)])

    ids, *_ = await asyncio.gather(drawn(model, good), bad(-8), bad([0, 11]), drawn(model, good))

    assert ids == generation(hf, PROMPT, STEPS, {1: lambda x: x + VECTOR}).ids
    assert (await drained(model))["entered"] == 0


async def test_declared_operations_of_a_cancelled_request_end_with_it(model: VLLM, hf: Any) -> None:
    async with model.trace(PROMPT, ops=[model.steer(1, VECTOR)], **{**GREEDY, "max_tokens": 4000}) as tracer:
        for _ in tracer.iter[:]:
            model.logits
    async with tracer.stream() as tokens:
        async for _ in tokens:
            break
    await drained(model)
    assert await drawn(model, None) == generation(hf, PROMPT, STEPS).ids


async def test_an_operation_that_ends_in_infinity_reaches_nobody(model: VLLM, hf: Any) -> None:
    """Its keys and values are NaN, in blocks that the next request is given."""
    await drawn(model, [model.steer(1, VECTOR, scale=3e38), model.steer(2, VECTOR, scale=3e38)])

    together = await asyncio.gather(*(drawn(model, None, [*PROMPT, number]) for number in range(8)))

    assert together == [generation(hf, [*PROMPT, number], STEPS).ids for number in range(8)]


@pytest.mark.backends("transformers")
def test_a_local_model_says_what_to_write_instead(model: Any) -> None:
    with pytest.raises(UnsupportedError, match="resid_post"):
        model.steer(model.model.layers[1], VECTOR)
    with pytest.raises(UnsupportedError, match="resid_post"):
        model.trace(PROMPT, ops=[])


def test_operations_are_not_made_in_blocks(model: VLLM) -> None:
    with pytest.raises(UnsupportedError, match="resid_post"), model.trace(PROMPT, max_tokens=1):
        model.steer(model.model.layers[1], VECTOR)


@pytest.fixture(scope="module")
def small() -> Iterator[VLLM]:
    """An engine that has room for a few blocks of keys and values, which it caches, and operations at two layers."""
    small = build(
        "llama", enable_prefix_caching=True, block_size=32, num_gpu_blocks_override=9, op_sites=["model.layers[1]"]
    )
    yield small
    small.close()


LONG = [*range(20, 70), 5, 17, 101, 9]


async def test_declared_operations_keep_their_prefixes_apart(small: VLLM, hf: Any) -> None:
    async def request(ops: Any) -> tuple[list[int], int]:
        (output,) = await small.generate(LONG, ops=ops, **GREEDY)
        return list(output.outputs[0].token_ids), output.num_cached_tokens

    plain, steered = generation(hf, LONG, STEPS).ids, generation(hf, LONG, STEPS, {1: lambda x: x + VECTOR}).ids
    assert plain != steered

    ops = [small.steer(1, VECTOR)]
    assert await request(ops) == (steered, 0)
    assert await request(None) == (plain, 0)
    assert await request(ops) == (steered, 0)
    assert await request(None) == (plain, 32)


async def test_edits_of_operations_share_prefixes_where_no_position_is_chosen(small: VLLM, hf: Any) -> None:
    prompt = [*LONG[:40], 1, 2, 3]
    steered = generation(hf, prompt, STEPS, {1: lambda x: x + OTHER}).ids
    at = generation(hf, prompt, STEPS, {1: lambda x: torch.cat([x[:, :-1] + OTHER, x[:, -1:]], dim=1)}).ids[:1]

    async def request(**more: Any) -> tuple[list[int], int]:
        (output,) = await small.generate(prompt, **{**GREEDY, **more})
        return list(output.outputs[0].token_ids), output.num_cached_tokens

    edit = await small.edit(ops=[small.steer(1, OTHER)])
    assert await request() == (steered, 0)
    assert await request() == (steered, 32)
    await edit.clear()
    edit = await small.edit(ops=[small.steer(1, OTHER, positions=slice(None, -1))])
    assert [await request(max_tokens=1) for _ in range(2)] == [(at, 0), (at, 0)]
    await edit.clear()


async def test_declared_operations_survive_preemption(small: VLLM, hf: Any) -> None:
    """Two requests of 154 tokens at their end, where 8 blocks of 32 are to be had."""
    prompts = [LONG[number:] for number in range(2)]
    ops = [[small.steer(1, VECTOR, positions=slice(3, -2))], [small.steer(1, OTHER, positions="generated")]]
    edits = [
        lambda x: torch.cat([x[:, :3], x[:, 3:52] + VECTOR, x[:, 52:]], dim=1),
        lambda x: torch.cat([x[:, :53], x[:, 53:] + OTHER], dim=1),
    ]

    got = await asyncio.gather(
        *(drawn(small, own, prompt, max_tokens=100) for own, prompt in zip(ops, prompts, strict=True))
    )

    for ids, prompt, edit in zip(got, prompts, edits, strict=True):
        assert ids == generation(hf, prompt, 100, {1: edit}).ids


def test_operations_act_at_the_declared_sites_alone(small: VLLM) -> None:
    with pytest.raises(NotASiteError, match=r"layers\[2\] is not one of.*model.model.layers\[1\].*op_sites="):
        traced(small, [small.steer(2, VECTOR)])


@pytest.mark.parametrize(
    ("sites", "error", "message"),
    [
        ("model.layers[1]", TypeError, "a list of strings"),
        (["model.layer[1]"], ValueError, "did you mean|layers"),
        (["model.layers[1].mlp"], ValueError, "not a layer"),
        (["model.layers[1].resid_pre"], ValueError, "not a layer"),
    ],
)
def test_sites_that_do_not_exist_are_told_when_the_model_is_made(
    llama: str, sites: Any, error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        VLLM(llama, op_sites=sites)
