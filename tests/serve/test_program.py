"""Blocks as data do what the same blocks do as Python, on a small model and without an engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec
import pytest
import torch

from nnsight_async import CaptureError, ShippingError
from nnsight_async.capture.recompile import recompiled
from nnsight_async.interleave.tracer import Tracer
from nnsight_async.serve import held, wire
from nnsight_async.serve import messages as m
from nnsight_async.serve import operations as ops
from nnsight_async.serve.block import of_probe
from nnsight_async.serve.bounds import LARGEST, LONGEST
from nnsight_async.serve.held import Room
from nnsight_async.serve.program import Program
from nnsight_async.tree.envoy import Envoy
from nnsight_async.tree.manifest import Manifest, ModuleInfo, ParameterInfo
from nnsight_async.tree.model import ModelView
from tests.interleave.toy import WIDTH, Bench, Toy

STEPS = 3
VECTOR = torch.linspace(-1, 1, WIDTH)
UNIT = VECTOR / VECTOR.norm()
SETTINGS = {"layer": 1, "top": 2}


def _info(path: str, module: torch.nn.Module) -> ModuleInfo:
    shapes = {name: tuple(part.shape) for name, part in module.named_parameters(recurse=False)}
    return ModuleInfo(
        path=path,
        cls=type(module).__name__,
        qualified=type(module).__name__,
        children=tuple(name for name, _ in module.named_children()),
        parameters=tuple(ParameterInfo(name, shape, "float32", shape) for name, shape in shapes.items()),
        is_list=isinstance(module, torch.nn.ModuleList),
    )


MANIFEST = Manifest("toy", "0", {path: _info(path, module) for path, module in Toy().named_modules()})
MODEL = ModelView(Envoy(MANIFEST))


def of_data(probe: Callable[[Any, Any], object]) -> Program:
    """The probe as a server gets it: sent, received, checked."""
    block = of_probe(probe, [MODEL, MANIFEST], MODEL)
    if block.reason is not None:
        raise block.reason
    code = {"type": "declared", "statements": block.statements}
    sent = wire.encode(m.RunRequest("0" * 32, [1], block=code), list(block.tensors))  # type: ignore[arg-type]
    received = m.take(sent, wire.Bounds())
    assert isinstance(received.body, m.RunRequest)
    assert isinstance(received.body.block, m.Declared)
    statements = m.statements_of(received.body.block, received.buffers)
    ops.check(statements, MANIFEST)
    return Program(statements)


def ran(program: Callable[[Any, Any], object]) -> tuple[list[Any], torch.Tensor]:
    """What is saved in each of some steps, and the logits of all."""
    bench = Bench()
    run = bench.add(1, lambda _m, _t: program(MODEL, Tracer(run)), 3)
    generator = torch.Generator().manual_seed(5)
    logits = [bench.step({1: torch.randn(rows, WIDTH, generator=generator)})[1] for rows in (3, *[1] * (STEPS - 1))]
    if run.error is not None:
        raise run.error
    saved = [(entry.name, entry.operation, entry.value) for _, _, entries, _ in bench.reports for entry in entries]
    return saved, torch.stack(logits)


def steered(model, tracer):
    for _ in tracer.iter[:]:
        model.layers[1].output += VECTOR
        h = model.layers[2].output[-1].save()


def in_place(model, tracer):
    for _ in tracer.all():
        h = model.layers[SETTINGS["layer"]].output
        h[-1] -= 2 * VECTOR
        h[:, :2] = 0
        model.layers[2].output[:] *= 0.5


def projected(model, tracer):
    for step in tracer.iter[1:3]:
        h = model.layers[0].output
        h = h - (h @ UNIT)[:, None] * UNIT
        model.layers[0].output = h.clamp(-1.0, max=1.0)
        number = (step + 1).save()


def collected(model, tracer):
    rows = [].save()
    norms = tracer.save([], "norms")
    for _ in tracer.iter[[0, 2]]:
        rows.append(model.layers[0].output[-1])
        norms.append(rows[-1].norm(dim=-1).item())


def lens(model, tracer):
    last = len(model.layers) - 1
    for i, layer in enumerate(model.layers):
        h = layer.output
        found = model.head(model.layers[last].norm(h)).log_softmax(-1)
        values, ids = found.topk(SETTINGS["top"], dim=-1)
        if i == last:
            ids = ids.save()
            best = torch.stack([values.max(), values.min()]).save()


def conditional(model, tracer):
    for _ in tracer.iter[:]:
        drawn = model.samples[0, 0]
        if drawn % 2 == 0:
            even = drawn.save()
        else:
            odd = drawn.save()
        model.samples[:] = 3


def skipped(model, tracer):
    before = model.layers[0].output
    model.layers[1].skip(before * 2)
    same = (model.layers[1].output - before).abs().sum().save()


def computed(model, tracer):
    h = model.layers[0].output.float()
    total = torch.where(h > 0, h, -h).sum().item()
    a = b = torch.cat([h, h[:1]], dim=0).to(torch.float64).save()
    parts = [h.mean(0).tolist(), (h.shape[0], int(total) // 2, max(total, 1.0))]
    parts.save()
    text = "as it is"
    text.save("text")
    model.logits[0, 1] = -5.0


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(equal, one.values(), other.values()))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.float(), other.float())
    return one == other


class Settings:
    scale = 3.0
    found: ClassVar[list[Any]] = []

    @property
    def layer(self):
        raise AssertionError("no code of the user's runs while a block is turned into data")


CONFIG = Settings()
KINDS = {"a": [1, (2.5, None)], 3: b"bytes", "t": VECTOR}


def carried(model, tracer):
    found = KINDS.save()
    scaled = (model.layers[0].output * CONFIG.scale).to(torch.float8_e4m3fn).save()
    third = KINDS[3].save()


def filling() -> Callable[[Any, Any], None]:
    """Lists and dicts from outside, one under two names."""
    tops, by_step = [0.0], {"last": -1.0}
    again = tops

    def filled(model, tracer):
        for _ in tracer.iter[:]:
            tops.append(model.layers[0].output.max().item())
            by_step["last"] = tops[-1]
            again.append(7.0)
            tops.save()
            by_step.save()

    return filled


PROBES = [carried, steered, in_place, projected, collected, lens, conditional, skipped, computed]


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.__name__)
def test_data_does_what_the_python_does(probe: Any) -> None:
    saved, logits = ran(recompiled(probe, named=True)[0])
    found, changed = ran(of_data(probe))
    assert [(name, operation) for name, operation, _ in found] == [(name, operation) for name, operation, _ in saved]
    assert all(equal(one, other) for (*_, one), (*_, other) in zip(found, saved, strict=True))
    torch.testing.assert_close(changed, logits, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:line .* changes .again. in the block")
def test_what_is_filled_from_outside_is_the_same_wherever_it_is_named() -> None:
    expected = ran(recompiled(filling(), named=True)[0])[0]
    tops, last = expected[-2:]
    assert tops[0] == "tops"
    assert len(tops[2]) == 1 + 2 * STEPS
    assert last == ("by_step", "set", {"last": tops[2][-2]})
    assert ran(of_data(filling()))[0] == expected


def test_what_is_saved_stays_as_it_was_though_it_is_changed_after() -> None:
    def probe(model, tracer):
        h = model.layers[0].output
        before = h.save()
        h[:] = 0

    ((name, _, value), *_), _ = ran(of_data(probe))
    assert name == "before"
    assert value.abs().sum() > 0


def test_an_error_stands_at_its_line_of_the_text() -> None:
    def probe(model, tracer):
        h = model.layers[0].output
        model.layers[1].output = h @ h

    with pytest.raises(RuntimeError, match="cannot be multiplied") as raised:
        ran(of_data(probe))
    lines = [entry.lineno + 1 for entry in raised.traceback if entry.frame.code.raw.co_filename == "<block>"]
    assert lines == [probe.__code__.co_firstlineno + 2]


def comprehension(model, tracer):
    x = [row * 2 for row in model.layers[0].output]


def lambdas(model, tracer):
    f = lambda: 1  # noqa: E731


def source(model, tracer):
    x = model.layers[0].source


def imported(model, tracer):
    import os  # noqa: F401


def looped(model, tracer):
    while True:
        pass


def dynamic(model, tracer):
    for _ in model.layers[0].output:
        pass


def named_late(model, tracer):
    model.layers[0].output.save()


def dunder(model, tracer):
    x = VECTOR.__class__


def starred(model, tracer):
    x = torch.cat(*[[VECTOR]])


def returned(model, tracer):
    return 1


def of_another(model, tracer):
    x = ANOTHER.layers[0].output.save()


def of_another_in_a_list(model, tracer):
    x = PARTS[0].output.save()


def misspelt(model, tracer):
    x = model.layerz[0].output.save()


def past_the_end(model, tracer):
    x = model.layers[99].output.save()


def past_the_end_of_a_list(model, tracer):
    x = (model.layers[0].output * WEIGHTS[5]).save()


def by_property(model, tracer):
    x = model.layers[CONFIG.layer].output.save()


def surrogate(model, tracer):
    x = "\ud800".save()


ANOTHER = ModelView(Envoy(msgspec.structs.replace(MANIFEST, repo="another")))
PARTS = [ANOTHER.layers[0]]

WEIGHTS = [1.0, 2.0]


def filled_unnamed(model, tracer):
    CONFIG.found.append(model.layers[0].output)


OTHERS = [
    past_the_end,
    past_the_end_of_a_list,
    misspelt,
    by_property,
    surrogate,
    comprehension,
    lambdas,
    source,
    imported,
    looped,
    dynamic,
    named_late,
    dunder,
    starred,
    returned,
    filled_unnamed,
]


@pytest.mark.parametrize("probe", OTHERS, ids=lambda probe: probe.__name__)
def test_everything_else_is_named_with_its_line(probe: Any) -> None:
    with pytest.raises(CaptureError, match=r"test_program\.py, line \d+: `.*` cannot travel as data: ") as raised:
        of_data(probe)
    assert f"line {probe.__code__.co_firstlineno + 1}:" in str(raised.value)


@pytest.mark.parametrize("probe", [of_another, of_another_in_a_list], ids=lambda probe: probe.__name__)
def test_modules_of_another_model_are_not_taken_for_those_of_this(probe: Any) -> None:
    with pytest.raises(ShippingError, match="belongs to another model"):
        of_data(probe)


# -- bounds ------------------------------------------------------------------------------------------------------------


def variable(name: str) -> ops.Variable:
    return ops.Variable(name)


X = variable("x")
WIDE = torch.zeros(LONGEST + 1)


def let(expression: Any) -> ops.Let:
    return ops.Let("x", expression)


def method(name: str, *arguments: Any, of: Any = X) -> ops.Method:
    return ops.Method(name, of, list(arguments))


TOO_MUCH = {
    "integers": ([let(ops.Value(3)), *[let(ops.Binary("*", X, X))] * 20], "4096 bits"),
    "outer": ([let(ops.Value(WIDE)), let(method("outer", X))], "elements; a block"),
    "broadcast": (
        [let(ops.Value(WIDE)), let(ops.Binary("+", X, ops.Item(X, [ops.Slice(), ops.Value(None)])))],
        "elements; a block",
    ),
    "in place": (
        [
            let(ops.Value(WIDE)),
            ops.Let("y", ops.Item(X, [ops.Slice(), ops.Value(None)])),
            ops.Change(variable("y"), "+", X),
        ],
        "elements; a block",
    ),
    "product": (
        [let(ops.Value(WIDE[:, None])), ops.Let("y", ops.Attribute("T", X)), let(ops.Binary("@", X, variable("y")))],
        "elements; a block",
    ),
    "work": (
        [let(ops.Value(torch.zeros(5500, 5500))), let(ops.Binary("@", X, X))],
        "more than a block that is data may compute",
    ),
    "joined": (
        [let(ops.Value(WIDE)), *[let(ops.Function("cat", [ops.Display([X] * 50)]))] * 3],
        "elements; a block",
    ),
    "chosen": (
        [
            let(ops.Value(torch.zeros(2, LONGEST))),
            let(ops.Item(X, [ops.Value(torch.zeros(LONGEST, dtype=torch.long))])),
        ],
        "elements; a block",
    ),
    "applied": (
        [let(ops.Value(torch.zeros(LARGEST // 16 + 1, 1))), let(ops.Apply("head", [X]))],
        "elements; a block",
    ),
    "clamped": (
        [
            let(ops.Value(WIDE[:, None])),
            let(ops.Method("clamp", X, [], {"min": ops.Attribute("T", X)})),
        ],
        "elements; a block",
    ),
    "summed": (
        [
            let(ops.Value(WIDE)),
            ops.Let("y", ops.Item(X, [ops.Slice(), ops.Value(None)])),
            let(ops.Function("sum", [ops.Display([X, variable("y")])])),
        ],
        "elements; a block",
    ),
    "compared": (
        [let(ops.Value(torch.zeros(LONGEST // 2, 1))), let(ops.Function("max", [X, ops.Attribute("T", X)]))],
        "elements; a block",
    ),
    "lists in a sum": ([let(ops.Function("sum", [ops.Value([[1], [2]]), ops.Value([])]))], "not list"),
    "sum over nothing": (
        [let(ops.Value(torch.empty(LARGEST + 1, 0))), let(method("sum", ops.Value(-1)))],
        "elements; a block",
    ),
    "nothing in another shape": (
        [let(ops.Value(torch.empty(0))), let(method("reshape", ops.Value(LARGEST + 1), ops.Value(0)))],
        "elements; a block",
    ),
    "product over nothing": (
        [let(ops.Value(torch.empty(LONGEST, 0))), let(ops.Binary("@", X, ops.Attribute("T", X)))],
        "elements; a block",
    ),
    "list of nothing": ([let(ops.Value(torch.empty(LONGEST + 1, 0))), let(ops.Function("list", [X]))], "goes through"),
    "nothing as a list": ([let(ops.Value(torch.empty(LONGEST + 1, 0))), let(method("tolist"))], "tolist"),
    "chosen by lists": (
        [let(ops.Value(torch.zeros(1, LONGEST))), let(ops.Item(X, [ops.Value([[0, 0]])]))],
        "whole numbers",
    ),
    "chosen by a tuple": (
        [let(ops.Value(torch.zeros(1, LONGEST))), let(ops.Item(X, [ops.Value((0,) * LONGEST), ops.Slice()]))],
        "elements; a block",
    ),
    "chosen after a new dimension": (
        [
            let(ops.Value(torch.zeros(1, LONGEST))),
            let(ops.Item(X, [ops.Value(None), ops.Value(torch.zeros(LONGEST, dtype=torch.long))])),
        ],
        "elements; a block",
    ),
    "chosen out of range": (
        [let(ops.Value(torch.zeros(3))), let(ops.Item(X, [ops.Value(torch.tensor([0, 3]))]))],
        "index 3 is out of bounds for a dimension of 3",
    ),
    "chosen before the first": (
        [let(ops.Value(torch.zeros(2, 3))), let(ops.Item(X, [ops.Rest(), ops.Value([-4])]))],
        "index -4 is out of bounds for a dimension of 3",
    ),
    "digits": ([let(ops.Function("round", [ops.Value(1), ops.Value(-(10**9))]))], "4096 digits"),
    "differences": ([let(ops.Value(WIDE)), let(method("diff", ops.Value(LONGEST)))], "subtracts at most"),
    "gone through": ([let(ops.Value(WIDE)), let(ops.Function("sum", [X]))], "goes through at most"),
    "as a list": ([let(ops.Value(WIDE)), let(method("tolist"))], "tolist"),
    "doubled": ([let(ops.Display([])), *[let(ops.Display([X, X]))] * 30], "in one another"),
    "in itself": ([let(ops.Display([])), ops.Do(method("append", X))], "in one another"),
    "in its part": (
        [let(ops.Display([])), ops.Let("y", ops.Display([X])), ops.Do(method("append", variable("y")))],
        "in one another",
    ),
    "in its place": (
        [let(ops.Value([0])), ops.Change(ops.Item(X, [ops.Value(0)]), "=", ops.Display([X]))],
        "in one another",
    ),
    "in place of nothing": (
        [let(ops.Value([0])), *[ops.Change(ops.Item(X, [ops.Slice(ops.Value(0), ops.Value(0))]), "=", X)] * 30],
        "replaced one by one",
    ),
    "text": ([let(ops.Value("x")), let(ops.Binary("*", X, ops.Value(1 << 30)))], "not str"),
    "lists": ([let(ops.Display([])), let(ops.Binary("==", X, X))], "not list"),
    "methods of text": ([let(ops.Value("x")), let(method("size"))], "for tensors"),
    "a name": ([let(variable("y"))], "'y' is not defined"),
}


@pytest.mark.parametrize(("statements", "why"), TOO_MUCH.values(), ids=TOO_MUCH)
def test_what_would_take_too_much_is_not_begun(statements: Any, why: str) -> None:
    ops.check(statements, MANIFEST)
    with pytest.raises((ValueError, TypeError, OverflowError, NameError, IndexError), match=why):
        ran(Program(statements))


MEBIBYTE = torch.zeros(1 << 18)
ROOM = Room(own=4 << 20, together=1 << 30)


def plus(number: int) -> ops.Binary:
    return ops.Binary("+", X, ops.Value(number))


def steps(*body: Any) -> ops.Steps:
    return ops.Steps(list(body))


KEPT = {
    "in variables": [ops.Let(f"y{number}", plus(number)) for number in range(5)],
    "in a list": [ops.Let("y", ops.Display([plus(number) for number in range(5)]))],
    "in a list over time": [ops.Let("y", ops.Display([])), *[ops.Do(method("append", plus(1), of=variable("y")))] * 5],
    "in places of a list": [
        ops.Let("y", ops.Value([0] * 5)),
        *[ops.Change(ops.Item(variable("y"), [ops.Value(at)]), "=", plus(1)) for at in range(5)],
    ],
    "in what is computed with": [ops.Let("y", ops.Function("cat", [ops.Display([plus(1)] * 5)]))],
    "as operands": [
        ops.Let("y", functools.reduce(lambda so_far, _: ops.Binary("+", plus(1), so_far), range(5), X)),
    ],
    "in one large value": [ops.Let("y", ops.Function("cat", [ops.Display([X] * 5)]))],
    "in part of what was read": [
        ops.Let(f"y{number}", ops.Item(plus(number), [ops.Slice(None, ops.Value(1))])) for number in range(5)
    ],
}
LET_GO = {
    "by a variable that is set again": [ops.Let("y", plus(number)) for number in range(20)],
    "after each statement": [ops.Do(plus(number)) for number in range(20)],
    "when a list is": [
        *[ops.Let("y", ops.Display([plus(number) for number in range(3)])), ops.Let("y", ops.Value(0))] * 5
    ],
    "though there are many views": [
        ops.Let("y", plus(1)),
        ops.Let("z", ops.Function("list", [ops.Item(variable("y"), [ops.Slice(None, ops.Value(100))])])),
        *[ops.Let(f"v{number}", method("flatten", of=variable("y"))) for number in range(20)],
    ],
    "though one value has many names": [ops.Let("y", plus(1)), *[ops.Let(f"v{n}", variable("y")) for n in range(20)]],
    "when it changes in place": [ops.Let("y", plus(1)), *[ops.Change(variable("y"), "+", ops.Value(1))] * 20],
    "though it came with the block": [ops.Let(f"y{number}", ops.Value(MEBIBYTE)) for number in range(20)],
}


@pytest.mark.parametrize("statements", KEPT.values(), ids=KEPT)
def test_what_a_block_holds_in_all_is_bounded(statements: list[ops.Statement]) -> None:
    with pytest.raises(MemoryError, match=r"may hold 4,194,304 at a time"):
        ran(Program([let(ops.Value(MEBIBYTE)), *statements], ROOM))
    ran(Program([let(ops.Value(MEBIBYTE)), *statements], Room(own=10 << 20)))


@pytest.mark.parametrize("statements", LET_GO.values(), ids=LET_GO)
def test_what_a_block_lets_go_is_not_held_against_it(statements: list[ops.Statement]) -> None:
    ran(Program([let(ops.Value(MEBIBYTE)), *statements], ROOM))


def test_what_is_read_counts_as_well_in_every_step() -> None:
    read = ops.Read("output", "layers.0")
    row = ops.Item(read, [ops.Slice(ops.Value(-1))])
    kept = [ops.Let("y", ops.Display([])), steps(ops.Do(method("append", row, of=variable("y"))))]
    size = 4 * WIDTH
    ran(Program(kept, Room(own=(3 + STEPS - 1) * size)))
    with pytest.raises(MemoryError):
        ran(Program(kept, Room(own=(3 + STEPS - 1) * size - 1)))
    ran(Program([steps(ops.Let("y", row))], Room(own=4 * size)))


def test_blocks_hold_so_much_together() -> None:
    def holding(number: int) -> tuple[Bench, Any]:
        bench = Bench()
        two = ops.Function("cat", [ops.Display([ops.Value(MEBIBYTE)] * 2)])
        program = Program([steps(let(two))], Room(own=8 << 20, together=number << 20))
        run = bench.add(1, lambda _m, _t: program(MODEL, Tracer(run)), 3)
        bench.step({1: torch.zeros(3, WIDTH)})
        return bench, run

    going = [holding(5), holding(5)]
    assert [run.error for _, run in going] == [None, None]
    _, third = holding(5)
    assert isinstance(third.error, MemoryError)
    assert "5,242,880 bytes of tensors together" in str(third.error)
    for _, run in going:
        run.kill()
    assert holding(5)[1].error is None


LISTED = method("tolist", of=ops.Value(torch.zeros(10, 10)))  # 110 items
KEEP = ops.Do(method("append", LISTED, of=variable("y")))


def test_lists_have_so_many_items_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "MOST_ITEMS", 1000)
    begin = ops.Let("y", ops.Display([]))
    ran(Program([begin, *[KEEP] * 9]))
    ran(Program([ops.Let("y", LISTED)] * 100))  # which are let go
    for statements in ([begin, *[KEEP] * 20], [ops.Let("y", ops.Display([LISTED] * 10))]):
        with pytest.raises(MemoryError, match="lists of more than 1,000 items"):
            ran(Program(statements))


CUBE = torch.arange(24.0).reshape(2, 3, 4)
CHOSEN = {
    "list": [[2, 0, -1]],
    "rows": [torch.tensor([1, -2])],
    "last": [..., torch.tensor([[3, 0], [-4, 1]])],
    "two": [torch.tensor([0, 1]), slice(None), [3, 3]],
    "new": [None, torch.tensor([1])],
    "mask": [CUBE[..., 0] > 5],
    "mask, then a number": [CUBE[..., 0] > 5, 2],
    "flags": [slice(None), [True, False, True]],
    "none": [torch.empty(0, dtype=torch.long)],
}


@pytest.mark.parametrize("keys", CHOSEN.values(), ids=CHOSEN)
def test_what_may_be_chosen_is_what_torch_chooses(keys: list[Any]) -> None:
    whole = CUBE.transpose(0, 1) if keys == [[2, 0, -1]] else CUBE
    given = [ops.Rest() if key is ... else ops.Slice() if isinstance(key, slice) else ops.Value(key) for key in keys]
    (saved, *_), _ = ran(Program([ops.Save("x", ops.Item(ops.Value(whole), given))]))
    assert torch.equal(saved[2], whole[tuple(keys)])


@pytest.mark.parametrize("name", sorted(ops.METHODS))
def test_every_method_is_one_of_tensors_that_changes_nothing(name: str) -> None:
    assert hasattr(torch.Tensor, name)
    assert not name.endswith("_")


def test_statements_are_read_from_json_as_the_docs_write_them() -> None:
    text = '[{"kind": "save", "name": "x", "value": {"kind": "read", "part": "logits"}}]'
    (statement,) = msgspec.json.decode(text, type=list[ops.Statement])
    assert isinstance(statement, ops.Save)
    assert isinstance(statement.value, ops.Read)
