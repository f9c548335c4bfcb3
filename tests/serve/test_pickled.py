"""A pickle holds what has no other form, and no more: everything else of a block is text and plain values beside it."""

from __future__ import annotations

import linecache
import pickletools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import pytest
import torch

from nnsight_async import ShippingError
from nnsight_async.capture.body import BodyCapture
from nnsight_async.capture.constants import LARGE
from nnsight_async.capture.load import load
from nnsight_async.capture.recompile import recompiled
from nnsight_async.serve import messages as m
from nnsight_async.serve import wire
from nnsight_async.serve.block import ServedBlock, of_probe, of_text
from tests.interleave.toy import WIDTH
from tests.serve.test_program import MANIFEST, MODEL, equal, ran
from tests.serve.test_source import DESCRIPTION, KEY, POLICY, received, resolve

OWNERS = [MODEL, MANIFEST]
VECTOR = torch.linspace(-1, 1, WIDTH)
TABLE = torch.arange(LARGE // 4 * 2.0).view(2, -1).T  # larger than what travels in a block, and not as it lies
PLAIN = {"words": ["plain words", (1, 2.5)], "more": None}


def own_function(value: Any) -> Any:
    return value * 3 + 1


class Own:
    def __init__(self, scale: float = 2.0) -> None:
        self.scale = scale

    def scaled(self, value: Any) -> Any:
        return own_function(value) * self.scale


OWN = Own()


def served(probe: Callable[[Any, Any], object]) -> ServedBlock:
    block = of_probe(probe, OWNERS, MODEL)
    assert block.reason is not None, "this one travels as data"
    return block


def forms(block: ServedBlock) -> dict[str, type]:
    """As what each value around the text of a block travels."""
    code, _ = received(block)
    assert isinstance(code, m.Source), "the whole of this one is a pickle"
    return {name: type(outer) for name, outer in {**code.free, **code.entries}.items()}


def arrived(block: ServedBlock) -> Any:
    """The block as the worker gets it."""
    code, buffers = received(block)
    made = POLICY.block(code, buffers, list(block.names), KEY)
    apart = {constant.digest: constant.content for constant in made.constants}
    return load(made.payload, resolve, constants=lambda digest: apart[digest].clone())


def same_as_local(probe: Callable[[Any, Any], object]) -> None:
    """Saves what the function saves as it is."""
    found, changed = ran(arrived(served(probe)))
    expected, logits = ran(recompiled(probe, named=True)[0])  # type: ignore[arg-type]
    assert [name for name, *_ in found] == [name for name, *_ in expected]
    assert expected
    assert all(equal(one, other) for (*_, one), (*_, other) in zip(found, expected, strict=True))
    torch.testing.assert_close(changed, logits, rtol=0, atol=0)


def uses_one_function(model, tracer):
    """Of four values around it, one has no safe form."""
    for _ in tracer.iter[:]:
        rows = [own_function(layer.output + VECTOR) for layer in model.layers].save()
        text = f"{PLAIN['words'][0]}: {len(rows)}".save()
        torch.manual_seed(0)


def test_only_the_function_is_in_the_bytes_of_the_pickle() -> None:
    block = served(uses_one_function)
    assert forms(block) == {"own_function": m.Pickled, "VECTOR": m.Value, "PLAIN": m.Value, "torch": m.Import}
    code, tensors = block.code(DESCRIPTION)
    vector, pickled = tensors
    assert torch.equal(vector, VECTOR)
    message = wire.encode(m.RunRequest("0" * 32, [1], block=code), tensors)
    assert message.endswith(bytes(pickled.tolist()))
    beside = message.removesuffix(bytes(pickled.tolist()))
    said = [argument for _, argument, _ in pickletools.genops(bytes(pickled[2:].tolist())) if argument is not None]
    assert "own_function" in said
    for text in ("plain words", "VECTOR", "PLAIN", "manual_seed", "rows"):
        assert text.encode() in beside
        assert text.encode() not in bytes(pickled.tolist())
    content = bytes(VECTOR.view(torch.uint8).tolist())
    assert content in beside
    assert content not in bytes(pickled.tolist())
    assert b"cloudpickle" not in beside
    assert len(pickled) < 2000


def test_the_block_does_what_it_does_here() -> None:
    same_as_local(uses_one_function)


def with_an_object(model, tracer):
    h = model.layers[1].output
    kind = isinstance(OWN, Own)
    found = {f"{kind}": OWN.scaled(h + TABLE[:WIDTH, 0]), "scale": Own(3).scale}.save()


def test_what_is_pickled_is_pickled_together() -> None:
    """A class and an object of it are of one kind there too."""
    block = served(with_an_object)
    assert forms(block) == {"OWN": m.Pickled, "Own": m.Pickled, "TABLE": m.Pickled, "WIDTH": m.Value}
    same_as_local(with_an_object)


def test_a_large_tensor_of_the_pickle_is_beside_it() -> None:
    block = served(with_an_object)
    code, (payload, apart) = block.code(DESCRIPTION)
    assert len(code.constants) == 1
    assert apart.nbytes == TABLE.nbytes
    assert payload.nbytes < 5000


SHARED: list[float] = [1.0]
HOLDS = {"rows": SHARED}


@dataclass
class Holder:
    rows: list[float] = field(default_factory=lambda: SHARED)
    vector: torch.Tensor = VECTOR


HOLDER = Holder()


def test_what_a_pickled_value_holds_is_the_same_object_there() -> None:
    def probe(model, tracer):
        SHARED.append(float(model.layers[0].output.sum()))
        VECTOR[0] = 7
        same = [SHARED is HOLDER.rows, HOLDER.vector is VECTOR, len(HOLDER.rows)].save()

    before = list(SHARED), VECTOR.clone()
    assert forms(served(probe)) == {"SHARED": m.Pickled, "VECTOR": m.Pickled, "HOLDER": m.Pickled}
    for _ in range(2):
        (((name, _, value),), _) = ran(arrived(served(probe)))
        assert (name, value) == ("same", [True, True, 2])
    assert before[0] == SHARED
    assert torch.equal(before[1], VECTOR)


def test_two_plain_values_that_share_a_list_share_it_there() -> None:
    def probe(model, tracer):
        h = model.layers[0].output
        SHARED.append(float(h.sum()))
        same = [HOLDS["rows"] is SHARED, PLAIN["more"]].save()

    assert forms(served(probe)) == {"SHARED": m.Pickled, "HOLDS": m.Pickled, "PLAIN": m.Value}
    ((_, _, value),), _ = ran(arrived(served(probe)))
    assert value == [True, None]


COUNT = 0


def counted() -> int:
    global COUNT
    COUNT += 1
    return COUNT


def read_count() -> int:
    return COUNT


def a_global_that_a_function_binds(model, tracer):
    h = model.layers[0].output
    calls = [counted() for _ in range(2)]
    seen = f"{COUNT} {calls}".save()


def a_global_that_the_block_binds(model, tracer):
    global COUNT
    h = model.layers[0].output
    COUNT = 5
    seen = f"{read_count()}".save()


@pytest.mark.parametrize(
    ("probe", "seen"),
    [
        (a_global_that_a_function_binds, "2 [1, 2]"),
        (a_global_that_the_block_binds, "5"),
    ],
)
def test_code_that_binds_one_anothers_globals_stays_together(probe: Any, seen: str) -> None:
    block = served(probe)
    assert isinstance(block.code(DESCRIPTION)[0], m.Python)
    (*_, (_, _, value)), _ = ran(arrived(block))
    assert value == seen
    assert COUNT == 0


def a_variable_that_both_read() -> Callable[[Any, Any], None]:
    scale = 3.0

    def scaled(value: Any) -> Any:
        return value * scale

    def probe(model, tracer):
        found = [scaled(model.layers[0].output) * scale for _ in range(1)].save()

    return probe


def test_code_that_reads_the_same_variable_does_not() -> None:
    probe = a_variable_that_both_read()
    assert forms(served(probe)) == {"scaled": m.Pickled, "scale": m.Value}
    same_as_local(probe)


# -- one value at a time -----------------------------------------------------------------------------------------------

TWICE = [SHARED, SHARED]
CYCLE: list[Any] = []
CYCLE.append(CYCLE)
DEEP: Any = 1
for _ in range(40):
    DEEP = [DEEP]
NEEDS_GRADIENT = torch.ones(2, requires_grad=True)
TURNED = torch.ones(2, 3).T
NO_DTYPE_OF_OURS = torch.zeros(2, dtype=torch.float4_e2m1fn_x2) if hasattr(torch, "float4_e2m1fn_x2") else OWN
SURROGATE = "\ud800"
MANY = list(range(20_000))
LONG = "x" * (2 << 20)
BIG = 1 << 40_000
TUPLE = (1, (2.0, "x"))
TUPLES = [TUPLE, TUPLE]

NOT_PLAIN = """
    OWN Own own_function TWICE CYCLE DEEP NEEDS_GRADIENT TURNED NO_DTYPE_OF_OURS SURROGATE MANY LONG BIG
""".split()  # noqa: SIM905


def of_name(name: str) -> Any:
    """A probe that uses a value, and a plain one."""
    text = f"def probe(model, tracer):\n    x = [{name} for _ in range(1)]\n    y = VECTOR\n"
    filename = f"<probe of {name}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {}
    exec(compile(text, filename, "exec"), globals(), namespace)
    return namespace["probe"]


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_a_value_that_is_not_plain_travels_alone(name: str) -> None:
    """One that would come as another, or that a pickle is better for."""
    found = forms(served(of_name(name)))
    assert {key: found[key] for key in (name, "VECTOR")} == {name: m.Pickled, "VECTOR": m.Value}


@pytest.mark.parametrize("name", ["TUPLE", "TUPLES", "VECTOR", "SHARED", "PLAIN"])
def test_a_value_that_is_plain_is_in_no_pickle(name: str) -> None:
    block = served(of_name(name))
    assert forms(block)[name] is m.Value
    assert block.payload == b""


def test_all_values_together_are_no_more_than_a_server_reads() -> None:
    lists = {f"list_{number}": list(range(9000)) for number in range(30)}
    texts = {f"text_{number}": "x" * 900_000 for number in range(12)}
    names = [*lists, *texts]
    text = f"def probe(model, tracer):\n    x = [{', '.join(names)}]\n    print(x)\n"
    linecache.cache["<many>"] = (len(text), None, text.splitlines(keepends=True), "<many>")
    namespace: dict[str, Any] = {**lists, **texts, "__name__": __name__}
    exec(compile(text, "<many>", "exec"), namespace)
    found = forms(served(namespace["probe"]))  # which a server reads with bounds of its own
    assert [found[name] for name in names].count(m.Value) < 20
    assert set(found.values()) >= {m.Value, m.Pickled}


# -- the body of a with ------------------------------------------------------------------------------------------------


class With:
    """Takes the body of a `with` as a served block."""

    block: ServedBlock

    def __enter__(self) -> Self:
        self._capture = BodyCapture(sys._getframe(1))
        self.block = of_text(self._capture.text(), lambda: self._capture.block(OWNERS), OWNERS)
        self._capture.skip(self)
        return self

    def __exit__(self, *raised: object) -> bool:
        return self._capture.leave(*raised)


def test_the_body_of_a_with() -> None:
    own = Own(4.0)
    names = ["a", "b"]
    with With() as taken:
        h = MODEL.layers[0].output
        found = {name: own.scaled(h) for name in names}
        found.save()
    assert forms(taken.block) == {"MODEL": m.Module, "own": m.Pickled, "names": m.Value}
    ((name, _, value),), _ = ran(arrived(taken.block))
    assert name == "found"
    assert list(value) == names


def test_values_of_an_earlier_trace_stay_behind() -> None:
    """Names that a body may well assign first hold what nobody asks for, and what cannot travel."""
    own = Own(4.0)
    for _ in range(2):
        with With() as taken:
            for _step in range(2):
                found = [own.scaled(MODEL.layers[0].output), _step]
            found.save()
        found = (value for value in [taken])  # a generator travels nowhere
    assert forms(taken.block) == {"MODEL": m.Module, "own": m.Pickled}
    assert [name for name, *_ in ran(arrived(taken.block))[0]] == ["found"]


def test_only_stale_values_are_left() -> None:
    found: Any = (value for value in [1])
    with With() as taken:
        for _step in range(2):
            found = {f"step {_step}": MODEL.layers[0].output}
        found.save()
    assert taken.block.payload == b""
    assert forms(taken.block) == {"MODEL": m.Module}
    assert [name for name, *_ in ran(arrived(taken.block))[0]] == ["found"]


def test_what_cannot_travel_is_named() -> None:
    lines = (line for line in ["a"])
    with pytest.raises(ShippingError, match="'lines', a generator"), With():
        found = [MODEL.layers[0].output, list(lines)].save()


# -- what a server makes of it -----------------------------------------------------------------------------------------


def test_nothing_of_a_pickle_is_loaded_where_it_arrives(tmp_path: Any) -> None:
    import os
    import pickle

    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "mark"),)

    from nnsight_async.capture.load import VERSION

    forged = VERSION + pickle.dumps({"x": Bomb()})
    code = m.Source("    y = x\n", "f.py", 1, (1, 1), ["model", "tracer"], {"x": m.Pickled()}, {}, "f", "f")
    message = wire.encode(
        m.RunRequest("0" * 32, [1], block=code), [torch.frombuffer(bytearray(forged), dtype=torch.uint8)]
    )
    opened = m.take(message, wire.Bounds())
    made = POLICY.block(opened.body.block, opened.buffers, [], KEY)  # type: ignore[union-attr,arg-type]
    assert not (tmp_path / "mark").exists()
    load(made.payload, resolve)  # as the worker does
    assert (tmp_path / "mark").exists()


def test_a_pickle_of_another_python_is_refused_in_the_worker() -> None:
    code = m.Source("    y = x\n", "f.py", 1, (1, 1), ["model", "tracer"], {"x": m.Pickled()}, {}, "f", "f")
    payload = torch.tensor([2, 7, 1], dtype=torch.uint8)
    opened = m.take(wire.encode(m.RunRequest("0" * 32, [1], block=code), [payload]), wire.Bounds())
    made = POLICY.block(opened.body.block, opened.buffers, [], KEY)  # type: ignore[union-attr,arg-type]
    with pytest.raises(ShippingError, match=r"Python 2\.7"):
        load(made.payload, resolve)


@pytest.mark.parametrize(
    ("fields", "buffers", "why"),
    [
        ({"free": {"x": m.Pickled()}}, 0, "fewer buffers"),
        ({"free": {"x": m.Pickled()}, "constants": [bytes(32)]}, 1, "fewer buffers"),
        ({"free": {"x": m.Pickled()}, "constants": [bytes(32)]}, 2, "digest"),
        ({"free": {"x": m.Pickled()}}, 2, "more buffers"),
        ({"constants": [bytes(32)]}, 1, "constants of no value"),
    ],
)
def test_buffers_that_do_not_fit_are_refused(fields: dict[str, Any], buffers: int, why: str) -> None:
    given = {"free": {}, "entries": {}, "constants": [], **fields}
    code = m.Source("    y = x\n", "f.py", 1, (1, 1), ["model", "tracer"], function="f", qualname="f", **given)
    content = [torch.zeros(3, dtype=torch.uint8)] * buffers
    opened = m.take(wire.encode(m.RunRequest("0" * 32, [1], block=code), content), wire.Bounds())
    with pytest.raises(wire.WireError, match=why):
        POLICY.block(opened.body.block, opened.buffers, [], KEY)  # type: ignore[union-attr,arg-type]
