"""Edits: blocks that every request of the engine runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nnsight_async import OutsideBlockError, SaveError, SurfaceError, save
from nnsight_async.testing.engine import drained
from nnsight_async.testing.oracle import generation
from tests.conftest import LONG

pytestmark = pytest.mark.backends("vllm", "transformers")

PROMPT = [5, 17, 101, 9, 33, 250, 77]
STEPS = 5
GREEDY = {"max_tokens": STEPS, "temperature": 0.0, "ignore_eos": True}
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
VECTOR = 3 * torch.randn(128, generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def no_edit_stays(model: Any) -> Iterator[None]:
    yield
    model.clear_edits()
    assert model.edits == ()


@pytest.fixture(scope="session")
def plain(hf: Any) -> Any:
    return generation(hf, PROMPT, STEPS)


@pytest.fixture(scope="session")
def steered(hf: Any) -> Any:
    found = generation(hf, PROMPT, STEPS, {1: lambda hidden: hidden + VECTOR})
    assert found.ids != generation(hf, PROMPT, STEPS).ids
    return found


def steers(model: Any, tracer: Any) -> None:
    for _ in tracer.iter[:]:
        model.model.layers[1].resid_post[:] += VECTOR


def ids(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


async def drawn(model: Any, **more: Any) -> list[int]:
    (output,) = await model.generate(PROMPT, **GREEDY, **more)
    return ids(output)


# -- installing --------------------------------------------------------------------------------------------------------


def test_the_body_of_a_with_runs_on_every_request(model, steered, plain):
    with model.edit() as (tracer, edit):
        for _ in tracer.iter[:]:
            model.model.layers[1].resid_post[:] += VECTOR
            row = model.model.layers[2].resid_post[-1].save()
    with model.trace(PROMPT, **GREEDY) as traced:
        for _ in traced.iter[:]:
            logits = model.logits.save()
    assert ids(traced.result) == steered.ids
    torch.testing.assert_close(logits[0], steered.logits[-1], **CLOSE)
    torch.testing.assert_close(traced.result.saves["row"], steered.streams[2][-1], **CLOSE)
    edit.clear()
    with model.trace(PROMPT, **GREEDY) as traced:
        logits = model.logits.save()
    assert ids(traced.result) == plain.ids
    assert "row" not in traced.result.saves
    edit.clear()  # once more: nothing


async def test_the_same_on_an_event_loop(model, steered, plain):
    async with model.edit("steering") as (tracer, edit):
        for _ in tracer.iter[:]:
            model.model.layers[1].resid_post[:] += VECTOR
            row = model.model.layers[2].resid_post[-1].save()
    assert edit.name == "steering"
    (output,) = await model.generate(PROMPT, **GREEDY)
    assert ids(output) == steered.ids
    torch.testing.assert_close(output.saves["row"], steered.streams[2][-1], **CLOSE)
    await edit.clear()
    assert await drawn(model) == plain.ids


async def test_a_function_as_the_block(model, steered):
    edit = await model.edit(steers, name="steering")
    assert edit.name == "steering"
    assert await drawn(model) == steered.ids
    assert [repr(each) for each in model.edits] == ["<the edit 'steering'>"]


async def test_what_is_installed_says_where_it_comes_from(model):
    await model.edit(steers)
    (edit,) = model.edits
    assert repr(edit) == f"<the edit of test_edits.py:{steers.__code__.co_firstlineno}>"
    await model.clear_edits()
    assert model.edits == ()


async def test_a_request_that_was_sent_before_goes_on_without(model, plain):
    async with model.trace(PROMPT, **GREEDY) as tracer:
        logits = model.logits.save()
    await model.edit(steers)
    assert ids(await tracer.result) == plain.ids
    await logits


# -- choosing ----------------------------------------------------------------------------------------------------------


def adds(value: float) -> Any:
    def probe(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            model.model.layers[1].resid_post[:] += value

    return probe


async def test_a_request_chooses_among_those_with_a_name(model):
    async def hidden(**more: Any) -> torch.Tensor:
        async with model.trace(PROMPT, max_tokens=1, **more):
            value = model.model.layers[1].resid_post.save()
        return await value

    bare = await hidden()
    await model.edit(adds(1.0), name="one")
    await model.edit(adds(10.0), name="ten")
    await model.edit(adds(100.0))
    for edits, total in (
        (None, 111.0),
        (["one"], 101.0),
        (("ten",), 110.0),
        (["ten", "one"], 111.0),
        ([], 100.0),
    ):
        torch.testing.assert_close(await hidden(edits=edits) - bare, torch.full_like(bare, total), rtol=0, atol=1e-3)


async def test_an_invoke_chooses_for_itself(model, steered, plain):
    await model.edit(steers, name="steering")
    async with model.trace(edits=[], **GREEDY) as tracer:
        with tracer.invoke(PROMPT):
            one = model.logits.save()
        with tracer.invoke(PROMPT, edits=["steering"]):
            other = model.logits.save()
    first, second = await tracer.result
    assert (ids(first), ids(second)) == (plain.ids, steered.ids)
    assert not torch.equal(await one, await other)


async def test_map_and_run_and_sequences(model, steered, plain):
    await model.edit(steers, name="steering")

    def reads(model: Any, tracer: Any) -> None:
        tracer.save(model.logits, "logits")

    async with model.map([PROMPT] * 2, reads, progress=False, edits=[], **GREEDY) as results:
        assert [ids(result.output) async for result in results] == [plain.ids] * 2
    async with model.run(PROMPT, reads, n=2, seed=1, **{**GREEDY, "temperature": 0.01}) as run:
        result = await run.result
    assert [list(one.token_ids) for one in result.outputs] == [steered.ids] * 2


async def test_names_that_are_not_there(model):
    await model.edit(steers, name="steering")
    with pytest.raises(ValueError, match=r"edits='stering': .* did you mean 'steering'\?"):
        await model.generate(PROMPT, edits=["stering"])
    with pytest.raises(TypeError, match=r"edits='steering': a list of the names"):
        await model.generate(PROMPT, edits="steering")
    with pytest.raises(ValueError, match="an edit named 'steering' is installed"):
        await model.edit(steers, name="steering")
    await model.clear_edits()
    with pytest.raises(ValueError, match="none has a name"):
        await model.generate(PROMPT, edits=["steering"])
    await model.edit(steers, name="steering")  # free again


# -- several on one request --------------------------------------------------------------------------------------------


async def test_edits_run_in_the_order_in_which_they_were_installed_and_before_the_block(model, hf):
    def doubles(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            model.model.layers[1].resid_post *= 2

    def moves(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            model.model.layers[1].resid_post += VECTOR

    for edits, change in (
        ((doubles, moves), lambda hidden: 2 * hidden + VECTOR),
        ((moves, doubles), lambda hidden: 2 * (hidden + VECTOR)),
        ((moves, moves), lambda hidden: hidden + 2 * VECTOR),
    ):
        for edit in edits:
            await model.edit(edit)
        async with model.trace(PROMPT, **GREEDY) as tracer:
            for _ in tracer.iter[:]:
                seen = model.model.layers[1].resid_post.save()
                model.model.layers[1].resid_post = seen - VECTOR
                own = model.model.layers[1].resid_post.save()
        between = generation(hf, PROMPT, STEPS, {1: lambda hidden, change=change: change(hidden) - VECTOR})
        assert ids(await tracer.result) == between.ids
        torch.testing.assert_close(await own, between.streams[1][-1:], **CLOSE)
        torch.testing.assert_close(await seen - await own, VECTOR[None], **CLOSE)
        await model.clear_edits()


async def test_values_of_all_come_with_the_tokens_and_with_the_result(model, steered):
    def steers_and_saves(model: Any, tracer: Any) -> None:
        for step in tracer.iter[:]:
            model.model.layers[1].resid_post[:] += VECTOR
            tracer.save(model.model.layers[1].resid_post[-1], "edited")
            tracer.save(step, "edit_step")

    await model.edit(steers_and_saves)
    async with model.trace(PROMPT, **GREEDY) as tracer:
        for _ in tracer.iter[:]:
            own = model.model.layers[2].resid_post[-1].save()
    tokens = [token async for token in tracer.stream()]
    start = len(PROMPT) - 1
    assert [token.id for token in tokens] == steered.ids
    assert [token.saves["edit_step"] for token in tokens] == list(range(STEPS))
    for name, layer in (("edited", 1), ("own", 2)):
        found = torch.stack([token.saves[name] for token in tokens])
        torch.testing.assert_close(found, steered.streams[layer][start:], **CLOSE)
    result = await tracer.result
    assert set(result.saves) == {"edited", "edit_step", "own"}
    torch.testing.assert_close(await own, result.saves["own"])
    async with model.run(PROMPT, lambda model, tracer: None, **GREEDY) as run:
        assert [token.saves["edit_step"] async for token in run.stream()] == list(range(STEPS))


async def test_a_name_that_two_blocks_save_is_refused(model):
    async with model.edit("watching") as (tracer, _):
        value = model.logits.save()
    async with model.trace(PROMPT, **GREEDY) as tracer:
        value = model.logits.save()
    with pytest.raises(SaveError, match="the block saves 'value', and the edit 'watching' does too"):
        await value
    async with model.trace(PROMPT, edits=[], **GREEDY) as tracer:
        value = model.logits.save()
    assert (await value).shape == (1, 512)
    await drained(model)


async def test_a_list_grows_in_an_edit_and_is_each_requests_own(model):
    outside: list[int] = []

    def collects(model: Any, tracer: Any) -> None:
        norms = tracer.save([], "norms")
        for step in tracer.iter[:]:
            norms.append(float(model.model.layers[0].resid_post[-1].norm()))
            outside.append(step)
            tracer.save(len(outside), "count")

    await model.edit(collects)
    outputs = await model.generate([PROMPT, PROMPT[:3]] * 3, **GREEDY)
    assert [len(output.saves["norms"]) for output in outputs] == [STEPS] * 6
    assert [output.saves["count"] for output in outputs] == [STEPS] * 6
    assert outside == []


async def test_an_edit_stops_a_request_and_what_the_block_has_comes_back(model, plain):
    def stops(model: Any, tracer: Any) -> None:
        for step in tracer.iter[:]:
            tracer.save(int(model.samples), "last")
            if step == 2:
                tracer.stop()

    await model.edit(stops)
    async with model.trace(PROMPT, **GREEDY) as tracer:
        steps = save([])
        for step in tracer.iter[:]:
            model.logits
            steps.append(step)
        after = save(len(steps))
    assert await steps == [0, 1, 2]
    assert await after == 3
    result = await tracer.result
    assert ids(result) == plain.ids[:3]
    assert (result.outputs[0].finish_reason, result.saves["last"]) == ("stop", plain.ids[2])
    (output,) = await model.generate(PROMPT, **GREEDY)
    assert (ids(output), output.saves["last"]) == (plain.ids[:3], plain.ids[2])
    await drained(model)


async def test_a_block_stops_a_request_that_has_edits(model, steered):
    def collects(model: Any, tracer: Any) -> None:
        steps = tracer.save([], "steps")
        for step in tracer.iter[:]:
            model.model.layers[1].resid_post[:] += VECTOR
            steps.append(step)
        tracer.save(len(steps), "count")

    await model.edit(collects)
    async with model.trace(PROMPT, **GREEDY) as tracer:
        for step in tracer.iter[:]:
            drawn = int(model.samples)
            save(drawn, "drawn")
            if step == 1:
                tracer.stop()
    result = await tracer.result
    assert ids(result) == steered.ids[:2]
    assert result.saves == {"drawn": steered.ids[1], "steps": [0, 1], "count": 2}


# -- errors ------------------------------------------------------------------------------------------------------------


async def test_what_an_edit_raises_ends_the_request_that_ran_it(model, plain):
    def fails(model: Any, tracer: Any) -> None:
        for step in tracer.iter[:]:
            if step == 1:
                raise ValueError("on purpose")

    await model.edit(fails, name="failing")
    healthy = asyncio.create_task(drawn(model, edits=[]))
    with pytest.raises(ValueError, match="on purpose") as caught:
        await model.generate(PROMPT, **GREEDY)
    assert caught.traceback[-1].path.name == "test_edits.py"
    assert any("in step 1" in note for note in caught.value.__notes__)
    async with model.trace(PROMPT, **GREEDY) as tracer:
        logits = model.logits.save()
    tokens = []
    with pytest.raises(ValueError, match="on purpose"):  # noqa: PT012
        async for token in tracer.stream():
            tokens.append(token.id)  # noqa: PERF401
    assert tokens == plain.ids[:1]
    assert await healthy == plain.ids
    with pytest.raises(ValueError, match="on purpose"):
        await logits
    await drained(model)


async def test_the_block_of_an_edit_cannot_be_what_a_block_cannot_be(model):
    with pytest.raises(SurfaceError, match=r"async with model\.edit"):
        model.edit().__enter__()
    async with model.edit() as (tracer, edit):
        model.logits
    with pytest.raises(OutsideBlockError, match=r"output.saves"):
        tracer.stream()
    with pytest.raises(OutsideBlockError, match=r"output.saves"):
        await tracer.result
    _, early = model.edit()._tracer, model.edit()._edit
    with pytest.raises(OutsideBlockError, match="its `with` ends"):
        early.clear()
    await edit.clear()


async def test_a_block_that_cannot_be_loaded_is_told_when_it_is_installed(model, plain):
    class Breaks:
        def __reduce__(self) -> Any:
            return int, ("no number",)

    broken = Breaks()

    def probe(model: Any, tracer: Any) -> None:
        print(broken)

    with pytest.raises(ValueError, match="invalid literal"):
        await model.edit(probe)
    assert model.edits == ()
    assert await drawn(model) == plain.ids


# -- clearing ----------------------------------------------------------------------------------------------------------


async def test_clearing_is_complete_for_requests_that_go_on(model, tmp_path):
    cleared = tmp_path / "cleared"

    def writes_sevens(model: Any, tracer: Any) -> None:
        for step in tracer.iter[:]:
            model.model.layers[1].resid_post[:] = 7.0
            tracer.save(step, "edited")

    edit = await model.edit(writes_sevens)
    async with model.trace(PROMPT, **LONG) as tracer:
        for step in tracer.iter[:]:
            now = step
            save(now, "now")
            sevens = save(bool((model.model.layers[1].resid_post == 7.0).all()))
            if cleared.exists():
                tracer.stop()
    stream = tracer.stream()
    first = [await anext(stream) for _ in range(3)]
    assert all(token.saves["sevens"] for token in first)
    await edit.clear()
    async with model.trace(PROMPT, max_tokens=1) as later:  # a step that began after the call
        untouched = save(bool((model.model.layers[1].resid_post == 7.0).any()))
    assert not await untouched
    cleared.touch()
    rest = [token async for token in stream]
    with_it = [token.index for token in (*first, *rest) if "edited" in token.saves]
    assert with_it == list(range(len(with_it)))
    assert len(with_it) < len(first) + len(rest)
    sevens_seen = [token.saves["sevens"] for token in (*first, *rest)]
    assert sevens_seen == [n < len(with_it) for n in range(len(sevens_seen))]
    assert await sevens is False
    await drained(model)


def adding(vector: torch.Tensor) -> Any:
    def probe(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            model.model.layers[1].resid_post[:] += vector

    return probe


def fails_later(model: Any, tracer: Any) -> None:
    for step in tracer.iter[:]:
        if step == 2:
            raise RuntimeError("on purpose")


async def test_many_edits_and_requests_come_and_go(model, hf):
    """Each request runs exactly what it asked for, while edits are installed, cleared and failing around it."""
    wanted = {(): generation(hf, PROMPT, STEPS).ids}
    for number in range(4):
        vector = (number + 1) * VECTOR / 4
        await model.edit(adding(vector), name=f"edit {number}")
        wanted[f"edit {number}",] = generation(hf, PROMPT, STEPS, {1: lambda hidden, v=vector: hidden + v}).ids

    async def one(number: int) -> None:
        names = list(wanted)[number % 5]
        assert await drawn(model, edits=names) == wanted[names]

    async def comes_and_goes(number: int) -> None:
        for _ in range(3):
            edit = await model.edit(fails_later, name=f"failing {number}")
            with pytest.raises(RuntimeError, match="on purpose"):
                await drawn(model, edits=[f"failing {number}"])
            await edit.clear()

    await asyncio.gather(*map(one, range(64)), *map(comes_and_goes, range(4)))
    assert (await drained(model))["edits"] == 4
    await model.clear_edits()
    assert (await drained(model))["edits"] == 0


# -- at the same time --------------------------------------------------------------------------------------------------


class Gate:
    """Holds the engine's edits up after the worker has answered one of its methods."""

    def __init__(self, model: Any, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._model = model
        self._method = method
        self._ask = model._engine.edits._ask
        self._opened = asyncio.Event()
        monkeypatch.setattr(model._engine.edits, "_ask", self.ask)

    async def ask(self, method: str, *args: Any) -> Any:
        answer = await self._ask(method, *args)
        if method == self._method:
            await self._opened.wait()
        return answer

    async def open(self) -> None:
        async def opens() -> None:
            self._opened.set()

        await asyncio.wrap_future(self._model._engine.call(opens()))


async def becomes(model: Any, edits: int) -> None:
    async with asyncio.timeout(60):
        while (await model.stats())["edits"] != edits:
            pass


async def test_of_edits_of_one_name_one_is_installed_and_the_others_leave_nothing(model, steered):
    results = await asyncio.gather(*(model.edit(steers, name="one") for _ in range(6)), return_exceptions=True)
    refused = [result for result in results if isinstance(result, ValueError)]
    assert len(refused) == 5
    assert all("an edit named 'one' is installed" in str(error) for error in refused)
    assert await drawn(model) == steered.ids
    assert (await model.stats())["edits"] == 1
    await model.clear_edits()
    assert (await model.stats())["edits"] == 0


@pytest.mark.backends("vllm")
async def test_who_is_cancelled_while_an_edit_is_installed_leaves_none(model, plain, monkeypatch):
    Gate(model, "nnsight_install", monkeypatch)
    installing = asyncio.ensure_future(model.edit(steers))
    await becomes(model, 1)
    installing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await installing
    await becomes(model, 0)
    assert model.edits == ()
    assert await drawn(model) == plain.ids


@pytest.mark.backends("vllm")
async def test_clearing_twice_is_complete_twice(model, monkeypatch):
    gate = Gate(model, "nnsight_clear", monkeypatch)
    edit = await model.edit(steers)
    first, second = edit.clear(), edit.clear()
    await model.stats()
    assert (first.done(), second.done()) == (False, False)
    await gate.open()
    await asyncio.gather(first, second)
    await edit.clear()


@pytest.mark.backends("vllm")
async def test_who_is_cancelled_while_an_edit_is_cleared_has_cleared_it(model, monkeypatch):
    large = torch.ones(1 << 20)

    def uses(model: Any, tracer: Any) -> None:
        tracer.save(float(large.sum()), "sum")

    gate = Gate(model, "nnsight_clear", monkeypatch)
    edit = await model.edit(uses)
    clearing = edit.clear()
    await becomes(model, 0)
    clearing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await clearing
    constants = model._engine._constants
    assert sum(constants._users.values()) == 1
    await gate.open()
    await edit.clear()
    assert sum(constants._users.values()) == 0
