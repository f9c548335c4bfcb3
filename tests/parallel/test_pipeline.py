"""Two stages do what one engine does: the same blocks on both, in one batch and beside one another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nnsight_async import VLLM, OutOfOrderError, StageError, UnsupportedError, save
from nnsight_async.testing.engine import HELD, drained
from nnsight_async.testing.oracle import generation
from tests.parallel.compare import CLOSE, PROMPT, assert_close, values

STEPS = 3
BEFORE, BEHIND = 1, 2  # the last layer of the first stage, and the first of the second
SAMPLING = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(autouse=True)
def nothing_stays(staged: VLLM) -> Iterator[None]:
    """On no stage."""
    yield
    staged.clear_edits()
    asyncio.run(drained(staged))
    for counts in on_every_stage(staged):
        assert not any(counts[name] for name in HELD if name in counts), counts


def on_every_stage(model: VLLM) -> list[dict[str, Any]]:
    engine: Any = model._engine
    return engine.call(engine.llm.collective_rpc("nnsight_counts")).result()


# -- reading -----------------------------------------------------------------------------------------------------------


def everything(model: Any, tracer: Any) -> None:
    tracer.save(tracer.cache(include_inputs=True), "cache")
    for _ in tracer.iter[:]:
        save(model.logits, "logits")
        save(model.samples, "samples")


def test_every_value_is_that_of_one_engine(one, staged):
    assert_close(values(staged, everything), values(one, everything))


def test_the_tree_is_that_of_one_engine(one, staged):
    wanted, found = one._engine.manifest.modules, staged._engine.manifest.modules
    assert list(found) == list(wanted)
    for path, info in wanted.items():
        mine = found[path]
        assert (mine.cls, mine.parameters, mine.aliases, mine.alias_of) == (
            info.cls,
            info.parameters,
            info.aliases,
            info.alias_of,
        )
        assert (len(mine.entries), mine.reachable, mine.source) == (len(info.entries), info.reachable, info.source)
    assert {path: found[path].stage for path in ("model.layers.1.mlp", "model.layers.2.mlp", "model.norm")} == {
        "model.layers.1.mlp": 0,
        "model.layers.2.mlp": 1,
        "model.norm": 1,
    }


def views(model: Any, tracer: Any) -> None:
    for step in tracer.iter[:]:
        for number in (BEFORE, BEHIND):
            layer = model.model.layers[number]
            save(layer.resid_pre, f"pre {number} {step}")
            save(layer.self_attn.source.rotary_emb_0.output, f"rotated {number} {step}")
            save(layer.self_attn.heads[3].q, f"q {number} {step}")
            save(layer.self_attn.heads.output, f"heads {number} {step}")
            save(layer.resid_mid, f"mid {number} {step}")
            save(layer.resid_post, f"post {number} {step}")


def test_views_are_those_of_one_engine(one, staged):
    assert_close(values(staged, views), values(one, views))


def test_values_are_those_of_transformers(staged, hf):
    oracle = generation(hf, PROMPT, STEPS)

    def probe(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            for number in range(4):
                save(model.model.layers[number].resid_post, f"post {number}")
            save(model.logits, "logits")

    found = values(staged, probe, steps=STEPS)
    for number in range(3):
        torch.testing.assert_close(found[f"post {number}"], oracle.streams[number][-1:], **CLOSE)
    torch.testing.assert_close(found["logits"], oracle.logits[-1:], **CLOSE)
    assert found["ids"] == oracle.ids


# -- writing -----------------------------------------------------------------------------------------------------------

PLACES: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "stream in": lambda layer: (layer, "resid_pre"),
    "stream in the middle": lambda layer: (layer, "resid_mid"),
    "keys": lambda layer: (layer.self_attn.heads, "k"),
    "neurons": lambda layer: (layer.mlp.down_proj, "input"),
    "mlp out": lambda layer: (layer.mlp, "output"),
    "stream out": lambda layer: (layer, "resid_post"),
}


def edits(place: str, *, in_place: bool) -> Callable[[Any, Any], None]:
    find = PLACES[place]

    def probe(model: Any, tracer: Any) -> None:
        for step in tracer.iter[:]:
            for number in (BEFORE, BEHIND):
                owner, attribute = find(model.model.layers[number])
                value = getattr(owner, attribute)
                noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(number))
                if in_place:
                    value += noise
                else:
                    setattr(owner, attribute, value + noise)
                save(getattr(owner, attribute), f"written {number} {step}")
            save(model.logits, f"logits {step}")

    return probe


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "replaced"])
@pytest.mark.parametrize("place", PLACES)
def test_an_edit_lands_as_on_one_engine(one, staged, place, in_place):
    probe = edits(place, in_place=in_place)
    found = values(staged, probe)
    assert_close(found, values(one, probe))
    unedited = values(staged, lambda model, tracer: save(model.logits, "logits"))
    assert not torch.allclose(found["logits 0"], unedited["logits"], atol=1e-2)


def carries(model: Any, tracer: Any) -> None:
    """What is written on each stage is what was read on the other, in this step or in the last."""
    seen = None
    for step in tracer.iter[:]:
        if seen is not None:
            model.model.embed_tokens.output[:] += seen
        early = model.model.layers[0].resid_post
        model.model.layers[3].mlp.output = early[:, :128] * 0.5
        chosen = int(model.logits.argmax()) + 1
        model.logits[:, chosen % 512] += 100.0
        seen = model.samples.float() / 512
        save(model.samples, f"samples {step}")
        save(seen, f"seen {step}")


def test_values_are_carried_between_the_stages(one, staged):
    found = values(staged, carries, steps=4)
    assert_close(found, values(one, carries, steps=4))
    assert found["ids"] == [int(found[f"samples {step}"]) for step in range(4)]


def at_the_ends(model: Any, tracer: Any) -> None:
    for step in tracer.iter[:]:
        model.model.embed_tokens.output[:] *= 1.5
        model.model.layers[0].mlp.skip(torch.full((5 if step == 0 else 1, 128), 0.25))
        model.model.layers[3].mlp.skip(torch.full((5 if step == 0 else 1, 128), 0.5))
        model.model.norm.output[0][:] += 0.5
        model.logits[:, 77] += 100.0
        save(model.logits, f"logits {step}")
        if step == 1:
            model.samples[:] = 99


def test_embeddings_skips_logits_and_samples_are_written(one, staged):
    found = values(staged, at_the_ends)
    assert found["ids"] == [77, 99, 77]
    assert_close(found, values(one, at_the_ends))


# -- modules of the other stage ----------------------------------------------------------------------------------------


def applies(model: Any, tracer: Any) -> None:
    for number in range(4):
        stream = model.model.layers[number].resid_post
        save(model.logits_processor(model.lm_head, model.model.norm(stream)), f"lens {number}")
        save(model.model.layers[3 - number].mlp(stream), f"mlp {number}")
        save(model.model.embed_tokens(torch.tensor([9, 300, 511])), f"embedded {number}")
        save(stream @ model.lm_head.weight.T, f"by hand {number}")
        save(model.model.norm.variance_epsilon, f"epsilon {number}")


def test_modules_are_applied_wherever_they_are(one, staged):
    assert_close(values(staged, applies), values(one, applies))


def test_what_a_module_of_another_stage_raises_is_raised_in_the_block(staged):
    def probe(model: Any, tracer: Any) -> None:
        for number in (0, 3):
            hidden = model.model.layers[number].resid_post
            try:
                model.model.layers[3 - number].mlp(hidden[:, :7])
            except RuntimeError:
                save(number, f"caught {number}")
            try:
                model.model.layers[number].output = hidden[:1]
            except ValueError as error:
                save(str(error), f"refused {number}")
        save(model.logits, "logits")

    assert {"caught 0", "caught 3", "refused 0", "refused 3", "logits"} <= values(staged, probe).keys()


def test_a_weight_of_another_stage_cannot_be_listed(staged):
    def probe(model: Any, tracer: Any) -> None:
        list(model.model.norm.parameters())

    with pytest.raises(UnsupportedError, match=r"model\.model\.norm is on stage 1 .*norm\.weight"):
        values(staged, probe)


def test_operations_around_the_layers_are_refused(staged):
    def probe(model: Any, tracer: Any) -> None:
        model.model.source.norm_0.output

    with pytest.raises((UnsupportedError, AttributeError)):
        values(staged, probe)


# -- ends --------------------------------------------------------------------------------------------------------------


def test_the_order_is_that_of_the_whole_model(staged):
    def probe(model: Any, tracer: Any) -> None:
        save(model.model.layers[3].mlp.output, "late")
        try:
            model.model.layers[0].mlp.output
        except OutOfOrderError as error:
            save(str(error), "error")
        save(model.logits, "logits")

    found = values(staged, probe)
    assert "model.model.layers[0].mlp.output has already been passed in step 0" in found["error"]


def test_a_location_that_does_not_come_is_told_of_at_the_end_of_the_step(one, staged):
    def probe(model: Any, tracer: Any) -> None:
        save(model.model.layers[1].mlp.output, "early")
        try:
            model.lm_head.output
        except AttributeError as error:
            save(type(error).__name__, "error")
        for step in tracer.iter[1:]:
            save(model.model.layers[2].mlp.output, f"later {step}")

    assert_close(values(staged, probe), values(one, probe))


@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_an_error_on_either_stage_ends_one_request(staged, layer, error):
    def breaks(model: Any, tracer: Any) -> None:
        for step in tracer.iter[:]:
            model.model.layers[layer].mlp.output[:] += 1.0
            if step == 1:
                raise error("on purpose")

    async def beside() -> tuple[Any, Any]:
        bad = staged.run(PROMPT, breaks, max_tokens=6)
        good = staged.run(PROMPT, everything, max_tokens=6, **SAMPLING)
        return await asyncio.gather(bad, good, return_exceptions=True)

    raised, fine = asyncio.run(beside())
    assert "on purpose" in str(raised)
    assert len(fine.outputs[0].token_ids) == 6


def test_an_error_on_one_stage_alone_ends_the_run_on_all(staged):
    def breaks(model: Any, tracer: Any) -> None:
        from vllm.distributed import get_pp_group

        for step in tracer.iter[:]:
            model.model.layers[0].mlp.output[:] += 1.0
            if step == 1 and get_pp_group().is_first_rank:
                raise LookupError("on the first stage")

    with pytest.raises(LookupError, match="on the first stage"):
        values(staged, breaks)


@pytest.mark.parametrize("last", [False, True])
def test_a_block_that_does_not_do_the_same_on_both_is_ended(staged, last):
    def differs(model: Any, tracer: Any) -> None:
        from vllm.distributed import get_pp_group

        save(model.model.layers[0].mlp.output, "first")
        if get_pp_group().is_last_rank == last:
            save(model.model.layers[1].mlp.output, "second")
        for step in tracer.iter[:]:
            save(model.logits, f"logits {step}")

    with pytest.raises(StageError, match="did not do the same on all stages"):
        values(staged, differs)


@pytest.mark.parametrize("layer", [0, 3])
def test_a_stop_ends_the_request(one, staged, layer):
    def stops(model: Any, tracer: Any) -> None:
        for step in tracer.iter[:]:
            save(model.model.layers[layer].mlp.output, f"mlp {step}")
            if step == 2:
                tracer.stop()
        save(1, "never")

    found = values(staged, stops, steps=6)
    assert len(found["ids"]) == 3
    assert_close(found, values(one, stops, steps=6))


def test_what_is_printed_and_warned_comes_home_once(staged, capsys):
    def says(model: Any, tracer: Any) -> None:
        import warnings

        model.model.layers[0].mlp.output
        print("upstream")
        model.model.layers[3].mlp.output
        print("downstream")
        warnings.warn("careful", stacklevel=1)

    with pytest.warns(UserWarning, match="careful") as warned:
        values(staged, says)
    assert len(warned) == 1
    assert capsys.readouterr().out.split() == ["upstream", "downstream"]


def test_the_same_random_numbers_are_drawn_on_both_stages(staged):
    def draws(model: Any, tracer: Any) -> None:
        import random

        for step in tracer.iter[:]:
            for number in (0, 3):
                hidden = model.model.layers[number].mlp.output.clone()
                noise = torch.rand(128) + random.random()
                model.model.layers[number].mlp.output[:] += noise
                save(model.model.layers[number].mlp.output - hidden, f"landed {number} {step}")
                save(noise.expand_as(hidden), f"drawn {number} {step}")

    found = values(staged, draws)
    for number in (0, 3):
        for step in range(3):
            torch.testing.assert_close(found[f"landed {number} {step}"], found[f"drawn {number} {step}"], **CLOSE)
    assert not torch.equal(found["drawn 0 1"], found["drawn 3 1"])


# -- requests beside one another ---------------------------------------------------------------------------------------


async def test_sixteen_requests_beside_one_another_have_their_own(one, staged):
    def steers(number: int) -> Callable[[Any, Any], None]:
        def probe(model: Any, tracer: Any) -> None:
            for step in tracer.iter[:]:
                save(model.model.layers[0].mlp.output, f"first {step}")
                model.model.layers[number % 4].mlp.output[:] *= 1.0 + number / 4
                save(model.model.layers[3].mlp.output, f"last {step}")
                save(model.logits, f"logits {step}")

        return probe

    prompts = [[40 + number, *PROMPT[: 1 + number % 5]] for number in range(16)]

    async def run(model: VLLM, number: int) -> Any:
        sampling = {"max_tokens": 4 + number % 3, **SAMPLING}
        if number % 4 == 3:
            (output,) = await model.generate(prompts[number], **sampling)
            return list(output.outputs[0].token_ids)
        result = await model.run(prompts[number], steers(number), **sampling)
        return result.saves, list(result.outputs[0].token_ids)

    found = await asyncio.gather(*(run(staged, number) for number in range(16)))
    assert_close(found, await asyncio.gather(*(run(one, number) for number in range(16))))


def test_steps_without_blocks_say_nothing(staged):
    before = [counts["exchanges"] for counts in on_every_stage(staged)]
    staged.run(PROMPT, lambda model, tracer: save(model.logits, "logits"), max_tokens=1).result()
    asyncio.run(drained(staged))
    between = [counts["exchanges"] for counts in on_every_stage(staged)]
    assert all(now > then for now, then in zip(between, before, strict=True))

    async def plainly() -> None:
        await staged.generate([PROMPT] * 4, max_tokens=8)

    asyncio.run(plainly())
    assert [counts["exchanges"] for counts in on_every_stage(staged)] == between


async def test_edits_run_on_every_request(one, staged):
    def first(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            model.model.layers[0].mlp.output[:] *= 2.0
            model.model.layers[3].mlp.output[:] *= 2.0

    def second(model: Any, tracer: Any) -> None:
        for step in tracer.iter[:]:
            save(model.model.layers[0].mlp.output, f"first {step}")
            save(model.model.layers[3].mlp.output, f"last {step}")
            model.model.layers[3].mlp.output[:] += 1.0

    async def outputs_of(model: VLLM) -> Any:
        for probe in (first, second):
            await model.edit(probe)
        outputs = await model.generate([PROMPT, PROMPT[:2]], max_tokens=4, **SAMPLING)
        found = [(output.saves, list(output.outputs[0].token_ids)) for output in outputs]
        await model.clear_edits()
        outputs = await model.generate([PROMPT], max_tokens=4, **SAMPLING)
        return [*found, list(outputs[0].outputs[0].token_ids)]

    assert_close(await outputs_of(staged), await outputs_of(one))


async def test_leaving_a_stream_frees_both_stages(staged):
    async with staged.run(PROMPT, everything, max_tokens=200, **SAMPLING) as run:
        async for token in run.stream():
            if token.index == 3:
                break


def test_invokes_and_several_sequences(one, staged):
    def of(model: VLLM) -> Any:
        with model.trace(max_tokens=2, **SAMPLING) as tracer:
            with tracer.invoke(PROMPT):
                early = save(model.model.layers[0].mlp.output)
            with tracer.invoke(PROMPT[:2]):
                late = save(model.model.layers[3].mlp.output)
        with model.trace(PROMPT, n=2, max_tokens=2, temperature=1.0, seed=3):
            both = save(model.model.layers[2].mlp.output)
        return [early, late, both]

    assert_close(of(staged), of(one))


async def test_declared_operations_act_on_every_stage(staged, hf):
    vectors = torch.randn(4, 128, generator=torch.Generator().manual_seed(5))
    wanted = generation(hf, PROMPT, 5, {n: lambda x, n=n: x + vectors[n] for n in range(4)})

    def nothing(model, tracer):
        for _ in tracer.iter[:]:
            tracer.save(model.logits, "logits")

    ops = [staged.steer(n, vectors[n]) for n in range(4)] + [staged.capture(1, "stream")]
    async with staged.run(PROMPT, nothing, ops=ops, max_tokens=5, temperature=0.0, ignore_eos=True) as run:
        tokens = [token async for token in run.stream()]

    assert [token.id for token in tokens] == wanted.ids
    torch.testing.assert_close(torch.cat([token.saves["logits"] for token in tokens]), wanted.logits, **CLOSE)
    torch.testing.assert_close(torch.cat([token.saves["stream"] for token in tokens]), wanted.streams[1], **CLOSE)
    with pytest.raises(ValueError, match="prompt has 5 tokens"):
        await staged.generate(PROMPT, ops=[staged.steer(0, vectors[0], positions=-6)], max_tokens=1)
