"""Blocks of few forms, drawn: what is done for many requests together is what each block does when it runs."""

from __future__ import annotations

import linecache
import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from nnsight_async.interleave import planned
from nnsight_async.interleave.bundle import Bundle
from tests.programs.drawn import Task
from tests.worker.causal import LAYERS, WIDTH
from tests.worker.simulation import Served, Simulation
from tests.worker.test_programs_simulated import MOVES, Schedule, assert_same, seen

SHARED = torch.linspace(-1, 1, WIDTH)
TENSORS = [f"model.model.layers[{layer}].{place}" for layer in range(LAYERS) for place in (
    "resid_pre", "self_attn.o_proj.input", "self_attn.output", "resid_mid", "mlp.output", "output[0]", "resid_post",
)]  # fmt: skip
PLACES = ["model.model.embed_tokens.output", *TENSORS, "model.model.norm.output[0]", "model.logits", "model.samples"]
WRITTEN = len(PLACES) - 2
PARTS = ("", "[-1]", "[0]", "[-1:]", "[:, 2:6]", "[..., 0]", "[None]", "[0:1][0]", "[-1, -1]")
VALUES = ("shared", "own", "0.5", "2 * own", "-1", "own[3]", "rows[0] - shared")
MISFITS = ("wide", "own[:5]")

filenames: dict[tuple[str, ...], str] = {}
"""By what a block says: a plan is of one place in the code."""


@dataclass(frozen=True)
class Text:
    """A block as its lines, and what it has in its closure."""

    lines: tuple[str, ...]
    scale: int

    def probe(self, number: int) -> Any:
        """The block of the request of that number: of one text for all, as theirs are who send a block many times."""
        source = "\n".join(["def block(model, tracer):", *(f"    {line}" for line in self.lines or ("pass",)), ""])
        filename = filenames.setdefault(self.lines, f"<drawn {len(filenames)}>")
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        own = self.scale * (number + 1) * torch.linspace(0, 1, WIDTH)
        names = {"shared": SHARED, "own": own, "rows": [own, SHARED], "wide": torch.ones(2, 3, WIDTH)}
        exec(compile(source, filename, "exec"), names)
        return names["block"]

    def __str__(self) -> str:
        return "\n".join(self.lines)


@st.composite
def statements(draw: Any, *, prefix: str, lists: tuple[str, ...]) -> list[str]:
    """In the order of the model, each with names of its own."""
    places = sorted(draw(st.lists(st.integers(0, len(PLACES) - 1), max_size=5)))
    lines: list[str] = []
    for number, place in enumerate(places):
        what, name = PLACES[place], f"{prefix}{number}"
        part = "" if place >= WRITTEN else draw(st.sampled_from(PARTS))
        kinds = (
            ["method", "function", "alias"]
            + (["append"] if lists else [])
            + (["change"] * 3 if place < WRITTEN else [])
        )
        match draw(st.sampled_from(kinds)):
            case "method":
                lines.append(f"{name} = {what}{part}.save()")
            case "function":
                lines.append(f'tracer.save({what}{part}, "{name}")')
            case "alias":
                lines += [f"h = {what}", f"{name} = h{part}.save()", f"{name}again = h{part}.save()"]
            case "append":
                lines.append(f"{draw(st.sampled_from(lists))}.append({what}{part})")
            case _:
                sign = draw(st.sampled_from(["+=", "-=", "*=", "/=", "="]))
                value = draw(st.sampled_from(VALUES * 3 + MISFITS))
                lines.append(f"h = {what}")
                lines.append(f"h{part or '[:]'} {sign} {value}")
                lines.append(f"{name} = h.save()")
    return lines


@st.composite
def texts(draw: Any) -> Text:
    lists = draw(st.sampled_from([(), ("acts",)]))
    lines = [f"{name} = [].save()" for name in lists]
    lines += draw(statements(prefix="first", lists=lists)) if draw(st.booleans()) else []
    loop = draw(
        st.sampled_from(
            ["tracer.iter[:]", "tracer.all()", "tracer.iter[1:4]", "tracer.iter[2]", "tracer.iter[::2]", ""]
        )
    )
    body = draw(statements(prefix="x", lists=lists)) if loop else []
    if body and (not lines or loop in ("tracer.iter[1:4]", "tracer.iter[2]")):
        lines += [f"for step in {loop}:", *(f"    {line}" for line in body)]
    return Text(tuple(lines), draw(st.integers(1, 3)))


@st.composite
def batches(draw: Any) -> list[tuple[Task, Text | None]]:
    """Several requests with the same text among them, which are done together."""
    known = draw(st.lists(texts(), min_size=1, max_size=3))
    tasks = st.builds(
        Task,
        prompt=st.lists(st.integers(8, 511), min_size=1, max_size=4).map(tuple),
        max_tokens=st.integers(1, 6),
        joins=st.none(),
    )
    return draw(st.lists(st.tuples(tasks, st.sampled_from([*known, *known, None])), min_size=1, max_size=6))


def done(
    simulation: Simulation, batch: list[tuple[Task, Text | None]], moves: list[Any], *, plans: bool
) -> list[Served]:
    simulation.blocks.interleaver.plans = plans  # type: ignore[misc]
    served = [
        simulation.add(task.prompt, None if text is None else text.probe(number), task.max_tokens)
        for number, (task, text) in enumerate(batch)
    ]
    Schedule(simulation, [(task, each) for (task, _), each in zip(batch, served, strict=True)]).run(list(moves))
    assert not simulation.blocks.runs
    interleaver = simulation.blocks.interleaver
    assert not interleaver.waiting
    assert not interleaver.sites.entered
    assert not interleaver.crews
    return served


EXAMPLES = settings(
    max_examples=int(os.environ.get("PLANS", "20")),
    deadline=None,
    derandomize="PLANS" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@EXAMPLES
@given(batch=batches(), moves=MOVES)
def test_together_as_each_alone(simulation, batch, moves):
    note("\n\n".join(f"{task}\n{text}" for task, text in batch))
    before = simulation.blocks.planned
    together = done(simulation, batch, moves, plans=True)
    assert simulation.blocks.planned - before == sum(text is not None for _, text in batch)
    ran = done(simulation, batch, moves, plans=False)
    for (task, _), one, other in zip(batch, together, ran, strict=True):
        assert_same(seen(task, one), seen(task, other))
        assert one.run.ledger.bytes == other.run.ledger.bytes
        assert line_of(one.run.error) == line_of(other.run.error)
        tensors = [value for value in one.run.values.values() if isinstance(value, torch.Tensor)]
        assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
    simulation.requests.clear()


def line_of(error: BaseException | None) -> int | None:
    """The line of the block that an error was raised in."""
    found = None
    trace = error.__traceback__ if error is not None else None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith("<drawn"):
            found = trace.tb_lineno
        trace = trace.tb_next
    return found


def test_requests_of_one_text_are_done_at_once_each_with_its_own(simulation, monkeypatch):
    sizes: list[int] = []

    class Counted(Bundle):
        def __init__(self, value: Any, rows: int, spans: Any) -> None:
            sizes.append(len(spans))
            super().__init__(value, rows, spans)

    monkeypatch.setattr(planned, "Bundle", Counted)
    there = "model.model.layers[2].mlp.output"
    after = "z = model.model.layers[2].resid_post.save()"
    text = Text((f"x = {there}.save()", f"h = {there}", "h[-1] = own", "y = h.save()", "again = h.save()", after), 1)
    batch = [(Task(prompt, 1), text) for prompt in ((9, 10), (11,), (12, 13), (14, 15))]
    found = done(simulation, batch, [], plans=True)
    assert sorted(sizes) == [1, 1, 3, 3]
    alone = done(simulation, batch, [], plans=False)
    for number, (one, other) in enumerate(zip(found, alone, strict=True)):
        own = (number + 1) * torch.linspace(0, 1, WIDTH)
        torch.testing.assert_close(one.run.values["y"][-1], own, check_dtype=False)
        assert_same(one.run.values, other.run.values)
        assert one.run.values["y"].data_ptr() != one.run.values["again"].data_ptr()
    simulation.requests.clear()


def test_the_block_of_a_request_sees_what_its_edit_has_written(simulation):
    there = "model.model.layers[2].mlp.output"
    edit = Text((f"{there}[:] = own", f"edited = {there}.save()"), 1).probe(0)
    block = Text(
        (f"seen = {there}.save()", f"{there}[:] += own", "z = model.model.layers[2].resid_post.save()"), 1
    ).probe(1)
    values: list[Any] = []
    for plans in (True, False):
        simulation.blocks.interleaver.plans = plans
        before = simulation.blocks.planned
        task = Task((9, 10), 1)
        served = simulation.add(task.prompt, block, task.max_tokens, edit=edit)
        Schedule(simulation, [(task, served)]).run([])
        assert simulation.blocks.planned - before == 2 * plans
        assert served.run.error is None
        values.append(served.run.values)
    torch.testing.assert_close(values[0]["seen"], torch.linspace(0, 1, WIDTH).expand(2, -1), check_dtype=False)
    assert_same(values[0], values[1])
    simulation.requests.clear()


@pytest.mark.parametrize(
    "lines",
    [
        ["acts = [].save()", "h = model.model.layers[1].mlp.output", "acts.append(h)", "h[:] += own"],
        ["acts = [].save()", "h = model.model.layers[1].mlp.output", "acts.append(h[-1])", "h[:] += own"],
        ["h = model.model.layers[1].inputs", "x = h.save()", "h[0][1][:] += own"],
    ],
)
def test_what_is_changed_after_it_was_put_into_a_list_is_left_to_the_block(simulation, lines):
    """For what comes home is the list as it is when the step ends."""
    batch = [(Task((9, 10), 3), Text(tuple(lines), 1))]
    before = simulation.blocks.planned
    (found,) = done(simulation, batch, [], plans=True)
    assert simulation.blocks.planned == before
    assert found.run.error is None
    if "acts" in found.run.values:
        (alone,) = done(
            simulation, [(Task((9, 10), 3), Text(("x = model.model.layers[1].mlp.output.save()",), 1))], [], plans=True
        )
        value, changed = alone.run.values["x"], found.run.values["acts"][0]
        own = torch.linspace(0, 1, WIDTH)
        torch.testing.assert_close(changed, value[-1] + own if changed.ndim == 1 else value + own)
    simulation.requests.clear()
