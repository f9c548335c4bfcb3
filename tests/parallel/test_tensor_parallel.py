"""Two ranks do what one does: the same blocks on both engines, and transformers beside them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nnsight_async import VLLM, BlockTimeoutError, UnsupportedError, save
from nnsight_async.testing.engine import HELD, drained
from nnsight_async.testing.oracle import generation
from tests.parallel.compare import CLOSE, PROMPT, assert_close, values

STEPS = 3
CONSTANT = torch.randn(1 << 19, generator=torch.Generator().manual_seed(1))  # travels apart from the block


@pytest.fixture(autouse=True)
def nothing_stays(two: VLLM) -> Iterator[None]:
    """On no rank."""
    yield
    two.clear_edits()
    asyncio.run(drained(two))
    for counts in on_every_rank(two):
        assert not any(counts[name] for name in HELD if name in counts), counts
        assert not counts["edits"]


def on_every_rank(model: VLLM) -> list[dict[str, Any]]:
    engine: Any = model._engine
    return engine.call(engine.llm.collective_rpc("nnsight_counts")).result()


# -- reading -----------------------------------------------------------------------------------------------------------


def everything(model: Any, tracer: Any) -> None:
    tracer.save(tracer.cache(include_inputs=True), "cache")
    for _ in tracer.iter[:]:
        save(model.logits, "logits")
        save(model.samples, "samples")


def test_every_value_is_that_of_one_rank(one, two):
    found, wanted = values(two, everything), values(one, everything)
    assert "model.layers.1.self_attn.qkv_proj.output" in found["cache"]
    assert_close(found, wanted)


def views(model: Any, tracer: Any) -> None:
    layer = model.model.layers[1]
    for step in tracer.iter[:]:
        save(layer.resid_pre, f"pre {step}")
        save(layer.self_attn.source.rotary_emb_0.output, f"rotated {step}")
        save(layer.self_attn.heads[3].q, f"q {step}")
        save(layer.self_attn.heads[3].k, f"k {step}")
        save(layer.self_attn.heads.v, f"v {step}")
        save(layer.self_attn.heads.output, f"heads {step}")
        save(layer.resid_mid, f"mid {step}")
        save(layer.mlp.down_proj.input, f"neurons {step}")
        save(layer.resid_post, f"post {step}")


def test_views_are_those_of_one_rank(one, two):
    assert_close(values(two, views), values(one, views))


def test_values_are_those_of_transformers(two, hf):
    oracle, (layer, norm) = generation(hf, PROMPT, STEPS), (hf.model.layers[2], hf.model.layers[2].input_layernorm)

    def probe(model: Any, tracer: Any) -> None:
        save(model.model.layers[2].self_attn.qkv_proj.output[0], "qkv")
        for _ in tracer.iter[:]:
            save(model.model.layers[2].resid_post, "post")
            save(model.logits, "logits")

    found = values(two, probe, steps=STEPS)
    with torch.no_grad():
        weights = [getattr(layer.self_attn, f"{name}_proj").weight for name in "qkv"]
        qkv = norm(oracle.streams[1][: len(PROMPT)]) @ torch.cat(weights).T
    torch.testing.assert_close(found["qkv"], qkv, **CLOSE)
    torch.testing.assert_close(found["post"], oracle.streams[2][-1:], **CLOSE)
    torch.testing.assert_close(found["logits"], oracle.logits[-1:], **CLOSE)
    assert found["ids"] == oracle.ids


# -- writing -----------------------------------------------------------------------------------------------------------

PLACES: dict[str, Callable[[Any], tuple[Any, str, Any]]] = {
    "column": lambda layer: (layer.mlp.gate_up_proj, "output", 0),
    "fused": lambda layer: (layer.self_attn.qkv_proj, "output", 0),
    "row in": lambda layer: (layer.mlp.down_proj, "input", None),
    "row out": lambda layer: (layer.self_attn.o_proj, "output", 0),
    "activation in": lambda layer: (layer.mlp.act_fn, "input", None),
    "activation out": lambda layer: (layer.mlp.act_fn, "output", None),
    "attention out": lambda layer: (layer.self_attn.attn, "output", None),
    "queries": lambda layer: (layer.self_attn.heads, "q", None),
    "keys": lambda layer: (layer.self_attn.heads, "k", None),
    "values": lambda layer: (layer.self_attn.heads, "v", None),
    "rotated keys": lambda layer: (layer.self_attn.source.rotary_emb_0, "output", 1),
    "stream in": lambda layer: (layer, "resid_pre", None),
    "stream in the middle": lambda layer: (layer, "resid_mid", None),
    "stream out": lambda layer: (layer, "resid_post", None),
    "mlp in": lambda layer: (layer.mlp, "input", None),
    "mlp out": lambda layer: (layer.mlp, "output", None),
}


def noise(value: torch.Tensor) -> torch.Tensor:
    return torch.randn(value.shape, generator=torch.Generator().manual_seed(value.shape[-1]))


def edits(place: str, *, in_place: bool) -> Callable[[Any, Any], None]:
    find = PLACES[place]

    def probe(model: Any, tracer: Any) -> None:
        for step in tracer.iter[:]:
            owner, attribute, element = find(model.model.layers[1])
            value = getattr(owner, attribute)
            part = value if element is None else value[element]
            if in_place:
                part += noise(part)
            elif element is None:
                setattr(owner, attribute, part + noise(part))
            else:
                setattr(owner, attribute, (*value[:element], part + noise(part), *value[element + 1 :]))
            again = getattr(owner, attribute)
            save(again if element is None else again[element], f"written {step}")
            save(model.model.layers[1].output, f"after {step}")
            save(model.logits, f"logits {step}")

    return probe


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "replaced"])
@pytest.mark.parametrize("place", PLACES)
def test_an_edit_lands_as_on_one_rank(one, two, place, in_place):
    probe = edits(place, in_place=in_place)
    found = values(two, probe)
    assert_close(found, values(one, probe))
    unedited = values(two, lambda model, tracer: save(model.logits, "logits"))
    assert not torch.allclose(found["logits 0"], unedited["logits"], atol=1e-2)


def writes_at_the_ends(model: Any, tracer: Any) -> None:
    for step in tracer.iter[:]:
        model.model.embed_tokens.output[:] *= 1.5
        model.model.layers[0].mlp.skip(torch.full((5 if step == 0 else 1, 128), 0.25))
        model.model.norm.output[0][:] += 0.5
        model.logits[:, 77] += 100.0
        save(model.logits, f"logits {step}")
        if step == 1:
            model.samples[:] = 99


def test_embeddings_skips_logits_and_samples_are_written(one, two):
    found = values(two, writes_at_the_ends)
    assert found["ids"] == [77, 99, 77]
    assert_close(found, values(one, writes_at_the_ends))


def applies(model: Any, tracer: Any) -> None:
    layer = model.model.layers[1]
    hidden = layer.resid_post
    normed = model.model.norm(hidden)
    save(model.logits_processor(model.lm_head, normed), "lens")
    save(layer.mlp(normed), "mlp")
    save(layer.mlp.gate_up_proj(normed)[0], "gate and up")
    save(layer.mlp.down_proj(layer.mlp.act_fn(layer.mlp.gate_up_proj(input_=hidden)[0]))[0], "by hand")
    save(layer.self_attn.qkv_proj(normed)[0], "qkv")
    save(layer.mlp.down_proj(torch.ones(2, 256))[0], "down")
    save(model.model.embed_tokens(torch.tensor([9, 300, 511])), "embedded")
    save(layer.mlp.forward(normed), "forward")
    save(model.compute_logits(normed), "computed")


def test_modules_are_applied_on_all_ranks(one, two):
    assert_close(values(two, applies), values(one, applies))


def test_a_module_that_cannot_be_applied_raises_in_the_block(two):
    def probe(model: Any, tracer: Any) -> None:
        hidden = model.model.layers[1].resid_post
        for number, wrong in enumerate((hidden[:, :7], object(), "text")):
            try:
                model.model.layers[1].mlp(wrong)
            except Exception as error:
                save(type(error).__name__, f"error {number}")
        save(model.logits, "logits")

    found = values(two, probe)
    assert found["error 1"] == UnsupportedError.__name__
    assert {"error 0", "error 2", "logits"} <= found.keys()


def test_a_collective_in_a_block_is_refused(two):
    def probe(model: Any, tracer: Any) -> None:
        from vllm.distributed import tensor_model_parallel_all_reduce

        tensor_model_parallel_all_reduce(model.model.layers[1].resid_post)

    with pytest.raises(UnsupportedError, match="on one rank alone"):
        values(two, probe)


def test_what_is_not_known_is_refused_with_a_reason(two):
    def probe(model: Any, tracer: Any) -> None:
        model.model.layers[0].self_attn.source.split_0.output

    with pytest.raises(UnsupportedError, match=r"source\.split_0\.output may differ from rank to rank"):
        values(two, probe)


# -- requests beside one another ---------------------------------------------------------------------------------------


async def test_requests_of_a_batch_have_their_own(one, two):
    def steers(number: int) -> Callable[[Any, Any], None]:
        def probe(model: Any, tracer: Any) -> None:
            for step in tracer.iter[:]:
                model.model.layers[number % 4].mlp.gate_up_proj.output[0][:] *= 1.0 + number / 4
                save(model.model.layers[number % 4].mlp.down_proj.input, f"neurons {step}")
                save(model.logits, f"logits {step}")

        return probe

    prompts = [[40 + number, *PROMPT[: 1 + number % 5]] for number in range(8)]
    sampling = {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True}

    async def run(model: VLLM, number: int) -> Any:
        if number % 3 == 2:
            (output,) = await model.generate(prompts[number], **sampling)
            return list(output.outputs[0].token_ids)
        result = await model.run(prompts[number], steers(number), **sampling)
        return result.saves, list(result.outputs[0].token_ids)

    found = await asyncio.gather(*(run(two, number) for number in range(8)))
    assert_close(found, [await run(one, number) for number in range(8)])


def test_steps_without_blocks_say_nothing(two):
    before = [counts["exchanges"] for counts in on_every_rank(two)]
    two.run(PROMPT, lambda model, tracer: save(model.logits, "logits"), max_tokens=1).result()
    asyncio.run(drained(two))
    between = [counts["exchanges"] for counts in on_every_rank(two)]
    assert between[0] > before[0]

    async def plainly() -> None:
        await two.generate([PROMPT] * 4, max_tokens=8)

    asyncio.run(plainly())
    assert [counts["exchanges"] for counts in on_every_rank(two)] == between


async def test_random_numbers_of_blocks_leave_other_requests_alone(two, hf):
    def draws(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            model.model.layers[1].output[0][:] += torch.rand(128)

    def watches(model: Any, tracer: Any) -> None:
        logits = tracer.save([], "logits")
        for _ in tracer.iter[:]:
            logits.append(model.logits)

    sampling = {"max_tokens": 8, "temperature": 1.0, "ignore_eos": True}
    _, watched = await asyncio.gather(
        two.run([60, 61], draws, **sampling), two.run(PROMPT, watches, **sampling), return_exceptions=False
    )
    ids = [*PROMPT, *watched.outputs[0].token_ids]
    with torch.no_grad():
        wanted = hf(torch.tensor([ids[:-1]])).logits[0, len(PROMPT) - 1 :]
    torch.testing.assert_close(torch.cat(watched.saves["logits"]), wanted, **CLOSE)


# -- edits, constants, ends --------------------------------------------------------------------------------------------


async def test_edits_run_on_every_request(one, two):
    def first(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            model.model.layers[1].self_attn.o_proj.input[:] *= 2.0

    def second(model: Any, tracer: Any) -> None:
        for step in tracer.iter[:]:
            save(model.model.layers[1].self_attn.o_proj.input, f"heads {step}")
            model.model.layers[1].self_attn.o_proj.input[:] += 1.0

    async def outputs_of(model: VLLM) -> Any:
        found = []
        for probe in (first, second):
            await model.edit(probe)
        outputs = await model.generate([PROMPT, PROMPT[:2]], max_tokens=4, temperature=0.0, ignore_eos=True)
        found += [(output.saves, list(output.outputs[0].token_ids)) for output in outputs]
        await model.clear_edits()
        outputs = await model.generate([PROMPT], max_tokens=4, temperature=0.0, ignore_eos=True)
        return [*found, list(outputs[0].outputs[0].token_ids)]

    assert_close(await outputs_of(two), await outputs_of(one))


def test_an_edit_that_cannot_be_loaded_is_on_no_rank(two):
    class Unreadable:
        def __reduce__(self) -> Any:
            return exec, ("raise LookupError('in the worker')",)

    broken = Unreadable()
    with pytest.raises(LookupError, match="in the worker"):
        asyncio.run(edited(two, lambda model, tracer: (broken, model.model.layers[0].output)))
    assert [counts["edits"] for counts in on_every_rank(two)] == [0, 0]


async def edited(model: VLLM, probe: Callable[[Any, Any], object]) -> None:
    await model.edit(probe)


def test_large_constants_are_on_the_first_rank(two):
    def probe(model: Any, tracer: Any) -> None:
        model.model.layers[0].output[0][:] += CONSTANT[:128]
        save(CONSTANT.sum(), "sum")

    assert_close(values(two, probe)["sum"], CONSTANT.sum())
    assert on_every_rank(two)[1]["constants"] == 0


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_an_error_ends_one_request(two, error):
    def breaks(model: Any, tracer: Any) -> None:
        for step in tracer.iter[:]:
            model.model.layers[1].self_attn.qkv_proj.output[0][:] += 1.0
            if step == 1:
                raise error("on purpose")

    async def beside() -> tuple[Any, Any]:
        bad = two.run(PROMPT, breaks, max_tokens=6)
        good = two.run(PROMPT, everything, max_tokens=6, temperature=0.0, ignore_eos=True)
        return await asyncio.gather(bad, good, return_exceptions=True)

    raised, fine = asyncio.run(beside())
    assert "on purpose" in str(raised)
    assert len(fine.outputs[0].token_ids) == 6


@pytest.mark.parametrize("applying", [False, True], ids=["in python", "in modules"])
def test_a_block_that_does_not_come_back_is_ended(two, applying):
    def endless(model: Any, tracer: Any) -> None:
        hidden = model.model.layers[1].mlp.down_proj.input
        began = time.monotonic()
        while time.monotonic() - began < 60:
            if applying:
                model.model.layers[1].mlp.down_proj(hidden)

    with pytest.raises(BlockTimeoutError):
        two.run(PROMPT, endless, max_tokens=2).result()
    values(two, everything)


def test_a_stop_ends_the_request(one, two):
    def stops(model: Any, tracer: Any) -> None:
        for step in tracer.iter[:]:
            save(model.model.layers[3].mlp.down_proj.input, f"neurons {step}")
            if step == 2:
                tracer.stop()

    found = values(two, stops, steps=6)
    assert len(found["ids"]) == 3
    assert_close(found, values(one, stops, steps=6))


async def test_leaving_a_stream_frees_all_ranks(two):
    async with two.run(PROMPT, everything, max_tokens=200) as run:
        async for token in run.stream():
            if token.index == 3:
                break


async def test_declared_operations_act_on_every_rank(two, hf):
    vectors = torch.randn(4, 128, generator=torch.Generator().manual_seed(5))
    wanted = generation(hf, PROMPT, 5, {n: lambda x, n=n: x + vectors[n] for n in range(4)})

    def nothing(model, tracer):
        for _ in tracer.iter[:]:
            tracer.save(model.logits, "logits")

    ops = [two.steer(n, vectors[n]) for n in range(4)] + [two.capture(1, "stream")]
    async with two.run(PROMPT, nothing, ops=ops, max_tokens=5, temperature=0.0, ignore_eos=True) as run:
        tokens = [token async for token in run.stream()]

    assert [token.id for token in tokens] == wanted.ids
    torch.testing.assert_close(torch.cat([token.saves["logits"] for token in tokens]), wanted.logits, **CLOSE)
    torch.testing.assert_close(torch.cat([token.saves["stream"] for token in tokens]), wanted.streams[1], **CLOSE)
    with pytest.raises(ValueError, match="prompt has 5 tokens"):
        await two.generate(PROMPT, ops=[two.steer(0, vectors[0], positions=-6)], max_tokens=1)
