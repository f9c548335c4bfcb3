"""Blocks of few forms that are out of the ordinary: what comes of them is what comes of running them."""

from __future__ import annotations

import itertools
import linecache
from dataclasses import dataclass, field
from textwrap import dedent, indent
from typing import Any

import pytest
import torch

from nnsight_async import save
from nnsight_async.interleave.plan import Slice
from nnsight_async.runs.shipment import Shipment
from tests.programs.drawn import Task
from tests.worker import simulation as simulated
from tests.worker.causal import WIDTH
from tests.worker.simulation import Simulation
from tests.worker.test_plans_simulated import line_of
from tests.worker.test_programs_simulated import Schedule

OWN = torch.linspace(0, 1, WIDTH)
numbers = itertools.count()


class Doubled(list):
    """A list whose items are not what is iterated over."""

    def __iter__(self) -> Any:
        return iter([2 * item for item in list.__iter__(self)])


NAMES = {"own": OWN, "rows": [OWN, -OWN], "pair": [1, 2], "doubled": Doubled([5.0]), "save": save}


@dataclass
class Found:
    """What came of a request."""

    ids: list[int]
    tokens: list[Any]
    error: tuple[str, str, int | None]
    values: Any
    bytes: int = field(default=0)


def block(text: str, **names: Any) -> Any:
    text = dedent(text).strip("\n").replace("LAYERS", "model.model.layers")
    source = f"def block(model, tracer):\n{indent(text, '    ')}\n"
    filename = f"<drawn as run {next(numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace = {**NAMES, **names}
    exec(compile(source, filename, "exec"), namespace)
    return namespace["block"]


def found(simulation: Simulation, probes: list[Any], *, plans: bool) -> list[Found]:
    simulation.blocks.interleaver.plans = plans  # type: ignore[misc]
    served = [simulation.add((9, 10, 11), probe, 4) for probe in probes]
    task = Task(prompt=(9, 10, 11), max_tokens=4, joins=None)
    Schedule(simulation, [(task, each) for each in served]).run([])
    simulation.requests.clear()
    return [
        Found(
            each.ids,
            [(token.id, exact(token.saves), token.finish_reason) for token in each.run.tokens],
            (type(each.run.error).__name__, str(each.run.error), line_of(each.run.error)),
            None if each.run.error else exact(dict(each.run.values)),
            each.run.ledger.bytes,
        )
        for each in served
    ]


def exact(value: Any) -> Any:
    """A value with order, types and bits, to be compared."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.nan_to_num(123).tolist()
    if isinstance(value, dict):
        return [(name, exact(item)) for name, item in value.items()]
    return [type(value), *map(exact, value)] if isinstance(value, (list, tuple)) else value


def assert_as_run(simulation: Simulation, probes: list[Any]) -> list[Found]:
    together = found(simulation, probes, plans=True)
    assert together == found(simulation, probes, plans=False)
    return together


NAMES_IN_LOOPS = {
    "saved under it": """
        v = own
        for step in tracer.iter[:]:
            LAYERS[0].mlp.output[:] += v
            v = LAYERS[1].mlp.output.save()
    """,
    "of an inner loop": """
        v = own
        for step in tracer.iter[:]:
            LAYERS[0].mlp.output[:] += v
            for v in rows:
                LAYERS[1].mlp.output[:] += v
            x = LAYERS[2].mlp.output.save()
    """,
    "assigned in an inner loop": """
        v = own
        for step in tracer.iter[:]:
            for each in pair:
                LAYERS[0].mlp.output[:] += v
                v = 2 * v
            x = LAYERS[2].mlp.output.save()
    """,
    "enumerate, assigned later": """
        for number, row in enumerate(rows):
            save(LAYERS[0].mlp.output, f"x{number}")
        enumerate = 5
    """,
    "list, assigned later": """
        acts = list().save()
        list = 5
    """,
}
LISTS = {
    "before the loop and in it": """
        acts = [].save()
        for step in tracer.iter[:]:
            acts = [].save()
            acts.append(LAYERS[1].mlp.output)
    """,
    "under another name too": """
        acts = [].save()
        other = acts
        for step in tracer.iter[:]:
            other.append(LAYERS[0].mlp.output)
            acts = [].save()
            acts.append(LAYERS[1].mlp.output)
    """,
    "whose name is saved again": """
        acts = [].save()
        for step in tracer.iter[:]:
            acts.append(LAYERS[0].mlp.output)
            save(LAYERS[1].mlp.output, "acts")
    """,
    "appended to in another order": """
        first = [].save()
        second = [].save()
        for step in tracer.iter[:]:
            second.append(LAYERS[0].mlp.output)
            first.append(LAYERS[1].mlp.output)
    """,
    "after a value": """
        x = LAYERS[0].mlp.output.save()
        acts = [].save()
        acts.append(LAYERS[1].mlp.output)
    """,
    "in the loop beside one before it": """
        acts = [].save()
        for step in tracer.iter[:]:
            inner = [].save()
            inner.append(LAYERS[0].mlp.output)
            acts.append(LAYERS[1].mlp.output)
            x = LAYERS[2].mlp.output.save()
    """,
    "of a class of its own": """
        for step in tracer.iter[:]:
            for v in doubled:
                LAYERS[0].mlp.output[:] += v
            x = LAYERS[1].mlp.output.save()
    """,
}
STEPS = {
    f"{steps} {what}": f"""
        {before}
        for step in tracer.iter[{steps}]:
            y = LAYERS[1].mlp.output.save()
    """
    for steps in ("0:0", ":0", "2:2", "-1", "1", "::3")
    for what, before in (("after a read", "x = LAYERS[0].mlp.output.save()"), ("alone", "pass"))
}
VALUES = {
    "a key that is a list of numbers": """
        h = LAYERS[0].mlp.output
        h[(0, 0), :] += own
        x = h.save()
    """,
    "a change of items that were copied": """
        part = LAYERS[0].mlp.output[(0, 0), :]
        part[:] += own
        x = part.save()
    """,
    "arguments, followed from step to step": """
        x = LAYERS[0].inputs.save()
        for step in tracer.iter[:]:
            y = LAYERS[1].mlp.output.save()
    """,
    "arguments in a list": """
        acts = [].save()
        for step in tracer.iter[:]:
            acts.append(LAYERS[1].inputs)
    """,
}
ERRORS = {
    "in the second line of a statement": """
        x = (
            LAYERS[1].mlp
            .output[7]
            .save()
        )
    """,
    "in an argument": """
        save(
            LAYERS[1].mlp.output[7],
            "x",
        )
    """,
    "after a change": """
        for step in tracer.iter[:]:
            h = model.logits
            h[:] *= -1
            y = h[7].save()
    """,
    "in the assignment after a change": """
        for step in tracer.iter[:]:
            LAYERS[1].output[0] += own
            y = LAYERS[2].mlp.output.save()
    """,
    "found where the block waits next": """
        for step in tracer.iter[:]:
            model.model.embed_tokens.input[:] = 5000
            x = model.logits.save()
    """,
    "found where the block waits for the next step": """
        for step in tracer.iter[:]:
            x = model.logits.save()
            model.samples += 600
    """,
    "found when the block is over": """
        model.model.embed_tokens.input[:] = 5000
    """,
}  # fmt: skip


@pytest.mark.parametrize("text", [
    pytest.param(text, id=name)
    for texts in (NAMES_IN_LOOPS, LISTS, STEPS, VALUES, ERRORS) for name, text in texts.items()
])  # fmt: skip
def test_as_if_it_ran(simulation, text):
    assert_as_run(simulation, [block(text), block(text)])


def test_operands_of_all_shapes_and_dtypes_beside_each_other(simulation):
    text = """
        for step in tracer.iter[:]:
            h = LAYERS[1].output
            x = h.save()
            h[0][:] += v
            y = h.save()
    """
    operands = [OWN, OWN[None], torch.ones(5), torch.tensor(2.0), OWN.bfloat16(), torch.arange(WIDTH)]
    ended = assert_as_run(simulation, [block(text, v=v) for v in operands])
    assert [each.error[0] for each in ended] == [*["NoneType"] * 2, "RuntimeError", *["NoneType"] * 3]


def test_a_number_and_a_tensor_without_dimensions(simulation):
    text = """
        for step in tracer.iter[:]:
            h = LAYERS[1].mlp.output
            h[-1, 3] *= v
            h[-1, 4] = v
            y = h.save()
    """
    for values in ((0.1, 0.1), (0.1, 0.3)):
        assert_as_run(simulation, [block(text, v=torch.tensor(value, dtype=torch.float32)) for value in values])


@pytest.mark.parametrize("budget", [100, 5000, 9000])
@pytest.mark.parametrize("what", ["save", "append"])
def test_past_the_budget(simulation, monkeypatch, budget, what):
    texts = {
        "save": """
            for step in tracer.iter[:]:
                h = model.logits
                h[:] *= -1
                x = h.save()
                y = h.save()
                h[:] *= -1
        """,
        "append": """
            acts = [].save()
            for step in tracer.iter[:]:
                acts.append(LAYERS[0].mlp.output)
                x = LAYERS[1].mlp.output.save()
                acts.append(LAYERS[2].mlp.output)
        """,
    }
    monkeypatch.setattr(simulated, "Shipment", lambda keys, block, _, *rest: Shipment(keys, block, budget, *rest))
    for each in assert_as_run(simulation, [block(texts[what])] * 2):
        assert each.error[0] == "SaveBudgetError" or budget == 9000


def test_a_loop_without_end_is_left_to_the_block_and_its_watchdog(simulation):
    text = """
        for number in endless:
            x = number
    """
    before = simulation.blocks.planned
    simulation.blocks.interleaver.plans = True
    program = block(text, endless=range(10_000))
    simulation.add((9, 10), program, 1)
    simulation.step(simulation.requests.values())
    assert simulation.blocks.planned == before
    simulation.finish(*simulation.requests.values())
    simulation.step([])
    simulation.letters.take()
    simulation.requests.clear()


def test_a_slice_is_no_tuple():
    assert Slice(0, 1, None) != (0, 1, None)
    assert hash(Slice(0, 1, None)) == hash(Slice(0, 1, None))


def test_a_long_prompt_that_is_read_is_not_written(simulation):
    """PyTorch counts a change in some copies as they are made."""
    simulation.blocks.interleaver.plans = False
    served = simulation.add(range(20, 40), block("x = LAYERS[0].mlp.output.save()"), 1)
    simulation.step([served])
    (run,) = simulation.blocks.runs
    assert not run.wrote
    assert not simulation.blocks.interleaver.remembers(run)
    simulation.finish(served)
    simulation.step([])
    simulation.letters.take()
    simulation.requests.clear()


def test_one_element_of_a_column_comes_home(simulation):
    """It lies in memory with a stride of its own."""
    text = "x = LAYERS[0].mlp.output[-1:, 3].save()"
    (each,) = assert_as_run(simulation, [block(text)])
    assert each.values[0][1][1] == (1,)
