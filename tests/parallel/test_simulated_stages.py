"""Random programs in drawn steps on the stages of a pipeline: what they see and do is what they see and do on one."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, note, settings

from nnsight_async import StageError, UnsupportedError, save
from tests.parallel.pipeline import Pipeline
from tests.programs.drawn import Task, batches
from tests.worker.simulation import Served, Simulation
from tests.worker.test_programs_simulated import EXAMPLES, MOVES, Move, Schedule, assert_same, run, seen

FEW = settings(EXAMPLES, max_examples=max(EXAMPLES.max_examples // 3, 1))


@pytest.fixture(scope="module")
def one() -> Simulation:
    return Simulation()


@pytest.fixture(scope="module")
def two() -> Iterator[Pipeline]:
    simulation = Pipeline(2)
    yield simulation
    simulation.close()


@pytest.fixture(scope="module")
def three() -> Iterator[Pipeline]:
    """The stage in the middle hears of one before it and of one behind it."""
    simulation = Pipeline(3)
    yield simulation
    simulation.close()


@FEW
@given(batch=batches(requests=(1, 6), rows=(1, 10), tokens=(1, 8)), moves=MOVES)
def test_programs(one, two, batch, moves):
    hold(one, two, batch, moves)


@FEW
@given(batch=batches(requests=(1, 6), rows=(1, 10), tokens=(1, 8), edits=True), moves=MOVES)
def test_programs_and_edits(one, two, batch, moves):
    hold(one, two, batch, moves)


@FEW
@given(batch=batches(requests=(1, 4), rows=(1, 10), tokens=(1, 6)), moves=MOVES)
def test_programs_on_three_stages(one, three, batch, moves):
    hold(one, three, batch, moves)


def hold(one: Simulation, many: Pipeline, batch: tuple[Task, ...], moves: list[Move]) -> None:
    note("\n".join(f"request {number}: {task}" for number, task in enumerate(batch)))
    on_one, on_many = run(one, batch, moves), run(many, batch, moves)
    for task, alone, together in zip(batch, on_one, on_many, strict=True):
        assert_same(seen(task, together), seen(task, alone))
    assert_nothing_left(many)
    one.requests.clear()
    many.requests.clear()


def assert_nothing_left(many: Pipeline) -> None:
    for _ in range(6):  # the stages hear of the last steps, if they have not
        many.step([])
    for blocks in many.every_blocks:
        interleaver = blocks.interleaver
        held = [blocks.runs, interleaver.waiting, interleaver.sites.entered, interleaver.sites.inside.watched]
        assert not any(held)
        kept = {name: vars(interleaver)[name] for name in ("closed", "_noted", "_coming", "_met", "_open")}
        assert not any(kept.values()), kept
        assert not interleaver._randomness._states


# -- one block at a time -----------------------------------------------------------------------------------------------


def served(simulation: Simulation, *probes: Any, steps: int = 3) -> list[Served]:
    """Requests with these blocks, in one batch."""
    requests = [simulation.add([5 + number, 6, 7, 8, 9], probe, steps) for number, probe in enumerate(probes)]
    Schedule(simulation, [(Task((), steps), request) for request in requests]).run([])
    simulation.requests.clear()
    return requests


def outcome(simulation: Simulation, probe: Any, steps: int = 3) -> Any:
    (request,) = served(simulation, probe, steps=steps)
    if request.run.error is not None:
        raise request.run.error
    return {**request.run.values, "ids": request.ids}


@pytest.fixture(params=["two", "three"])
def many(request: pytest.FixtureRequest) -> Iterator[Pipeline]:
    simulation = request.getfixturevalue(request.param)
    yield simulation
    assert_nothing_left(simulation)


def everything(model: Any, tracer: Any) -> None:
    tracer.save(tracer.cache(include_inputs=True), "cache")
    for _ in tracer.iter[:]:
        save(model.logits, "logits")


def looks_into_its_cache(model: Any, tracer: Any) -> None:
    cache = tracer.cache([model.model.layers[0].mlp, "model.layers.3.mlp"])
    for step in tracer.iter[:]:
        hidden = model.model.layers[1].mlp.output
        hidden += cache["model.layers.0.mlp.output"][-1]
        model.model.norm.output[0][:] *= 1 + len(cache)
        save(len(cache), f"locations {step}")
        save(model.logits, f"logits {step}")
        save({name: len(values) for name, values in cache.items()}, f"counts {step}")


def carries(model: Any, tracer: Any) -> None:
    seen = 0.0
    for step in tracer.iter[:]:
        model.model.embed_tokens.output[:] += seen
        early = model.model.layers[0].resid_post
        model.model.layers[3].mlp.output = early * 0.5
        model.logits[:, int(model.logits.argmax()) // 2] += 100.0
        seen = float(model.samples) / 512
        save(seen, f"seen {step}")


def applies(model: Any, tracer: Any) -> None:
    for step in tracer.iter[:]:
        save(model.model.norm(torch.full((1, 128), 2.0 + step, dtype=torch.double)), f"before {step}")
        for number in range(4):
            stream = model.model.layers[number].resid_post
            save(model.logits_processor(model.lm_head, model.model.norm(stream)), f"lens {number} {step}")
            save(model.model.layers[3 - number].mlp(stream), f"mlp {number} {step}")
            save(model.model.embed_tokens(torch.tensor([9, 300])), f"embedded {number} {step}")
            save(stream @ model.lm_head.weight.T, f"by hand {number} {step}")
    save(model.model.embed_tokens(torch.tensor([1])), "after")


def catches(model: Any, tracer: Any) -> None:
    caught = []
    for number in (0, 3):
        layer, other = model.model.layers[number], model.model.layers[3 - number]
        for wrong in (
            lambda layer=layer: setattr(layer, "output", layer.output[0][:1]),
            lambda other=other: other.mlp(torch.ones(2, 7)),
            lambda layer=layer: layer.mlp.output,
            lambda layer=layer: layer.nothing,
        ):
            try:
                wrong()
            except Exception as error:
                caught.append(type(error).__name__)
        layer.output[0][:] += len(caught)
    save(model.logits, "logits")
    save(caught, "caught")


def shares_a_module(model: Any, tracer: Any) -> None:
    rotary = model.model.layers[0].self_attn.rotary_emb
    for step in tracer.iter[:]:
        for number in range(4):
            save(rotary.output[0], f"rotated {number} {step}")
            rotary.output[0][:] *= 1 + number / 4
            save(model.model.layers[number].self_attn.output, f"attended {number} {step}")


def waits_in_vain(model: Any, tracer: Any) -> None:
    for step in tracer.iter[:]:
        save(model.model.layers[0].mlp.output, f"first {step}")
        try:
            model.model.layers[1].self_attn.source.nothing_0.output
        except AttributeError:
            save(step, f"caught {step}")
        save(model.model.layers[3].mlp.output, f"last {step}")


def stops_early(model: Any, tracer: Any) -> None:
    for step in tracer.iter[:]:
        save(model.model.layers[0].mlp.output, f"first {step}")
        if step == 1:
            tracer.stop()
        save(model.model.layers[3].mlp.output, f"last {step}")


def is_over_before(model: Any, tracer: Any) -> None:
    save(model.model.layers[0].mlp.output, "first")


def is_over_behind(model: Any, tracer: Any) -> None:
    for _ in tracer.iter[:2]:
        save(model.model.layers[3].mlp.output, "last")


PROBES = [everything, looks_into_its_cache, carries, applies, catches, shares_a_module, waits_in_vain, stops_early]
PROBES += [is_over_before, is_over_behind]


@pytest.mark.parametrize("probe", PROBES, ids=[probe.__name__ for probe in PROBES])
def test_a_block_does_on_several_stages_what_it_does_on_one(one, many, probe):
    assert_same(outcome(many, probe, 4), outcome(one, probe, 4))


def test_all_of_them_at_once(one, two):
    for got, alone in zip(served(two, *PROBES, None), served(one, *PROBES, None), strict=True):
        assert_same([got.ids, got.run.values, str(got.run.error)], [alone.ids, alone.run.values, str(alone.run.error)])


@pytest.mark.parametrize("number", [0, 3])
def test_an_error_is_the_callers_on_whichever_stage(many, number):
    def breaks(model: Any, tracer: Any) -> None:
        for step in tracer.iter[:]:
            model.model.layers[number].mlp.output
            if step == 1:
                raise LookupError("on purpose")

    fine: Any = lambda model, tracer: save(model.logits, "logits")  # noqa: E731
    bad, good = served(many, breaks, fine)
    assert isinstance(bad.run.error, LookupError)
    assert good.run.error is None
    assert "logits" in good.run.values


def on(stage: int) -> bool:
    """Whether this is the thread of that stage."""
    return threading.get_ident() == THREADS[stage]


THREADS: dict[int, int] = {}


@pytest.fixture
def known_threads(two: Pipeline) -> None:
    def note_thread(stage: Any) -> None:
        THREADS[stage.number] = threading.get_ident()

    two._each(note_thread)


@pytest.mark.usefixtures("known_threads")
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("number", [0, 2, 3])
def test_an_error_on_one_stage_alone_ends_the_run(two, stage, number):
    def breaks(model: Any, tracer: Any) -> None:
        for step in tracer.iter[:]:
            model.model.layers[number].mlp.output
            if step == 1 and on(stage):
                raise LookupError("there")
            save(model.logits, f"logits {step}")

    with pytest.raises(LookupError, match="there"):
        outcome(two, breaks, 4)
    assert_nothing_left(two)


@pytest.mark.usefixtures("known_threads")
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("less", ["reads", "applies", "ends"])
def test_a_block_that_does_less_on_one_stage_is_ended(two, stage, less):
    def differs(model: Any, tracer: Any) -> None:
        for step in tracer.iter[:]:
            save(model.model.layers[0].mlp.output, f"first {step}")
            if on(stage) and step == 1:
                if less == "ends":
                    return
            elif step == 1:
                _ = model.model.layers[1].mlp.output if less == "reads" else model.model.norm(torch.ones(1, 128))
            save(model.logits, f"logits {step}")

    with pytest.raises(StageError, match="in step 1 the block did not do the same on all stages"):
        outcome(two, differs, 4)
    assert_nothing_left(two)


def test_random_numbers_are_the_same_on_all_stages(many):
    def draws(model: Any, tracer: Any) -> None:
        for step in tracer.iter[:]:
            for number in range(4):
                mlp = model.model.layers[number].mlp
                before = mlp.output.clone()
                noise = torch.rand(128) + random.random()
                mlp.output[:] += noise
                save((mlp.output - before)[0], f"landed {number} {step}")
                save(noise.double(), f"drawn {number} {step}")

    first, second = served(many, draws, draws)
    for number in range(4):
        for step in range(3):
            landed = first.run.values[f"landed {number} {step}"]
            torch.testing.assert_close(landed, first.run.values[f"drawn {number} {step}"])
    drawn = [values["drawn 0 0"] for values in (first.run.values, second.run.values)]
    assert not torch.equal(*drawn)


def test_operations_around_the_layers_are_refused(many):
    def probe(model: Any, tracer: Any) -> None:
        model.model.source.norm_0.output

    with pytest.raises(UnsupportedError, match="goes over all stages of the pipeline"):
        outcome(many, probe)


def test_tensors_of_modules_elsewhere_are_fetched_and_not_listed(many):
    def lists(model: Any, tracer: Any) -> None:
        list(model.model.norm.parameters())

    with pytest.raises(UnsupportedError, match=r"model\.model\.norm is on stage \d of the pipeline.*norm\.weight"):
        outcome(many, lists)


def test_the_tree_is_that_of_one_stage(one, many):
    wanted = one.blocks.interleaver.model.tree._manifest.modules
    found = many.manifest.modules
    assert list(found) == list(wanted)
    for path, info in wanted.items():
        mine = found[path]
        assert (mine.aliases, mine.alias_of, mine.children) == (info.aliases, info.alias_of, info.children), path
        assert (mine.reachable, len(mine.entries), mine.parameters) == (
            info.reachable,
            len(info.entries),
            info.parameters,
        ), path
    in_order = sorted(wanted, key=lambda path: wanted[path].entries)
    assert in_order == sorted(found, key=lambda path: found[path].entries)
