"""Blocks of Python that travel as text do what the same blocks do as they are, and hold no pickle."""

from __future__ import annotations

import math
from collections.abc import Callable
from math import sqrt
from typing import Any

import msgspec
import pytest
import torch

from nnsight_async import save
from nnsight_async.capture.load import load
from nnsight_async.capture.recompile import recompiled
from nnsight_async.serve import messages as m
from nnsight_async.serve import wire
from nnsight_async.serve.access import Key
from nnsight_async.serve.block import ServedBlock, of_probe
from nnsight_async.serve.policy import Policy
from nnsight_async.tree.envoy import Envoy
from tests.interleave.toy import WIDTH
from tests.serve.test_program import ANOTHER, MANIFEST, MODEL, STEPS, equal, ran

VECTOR = torch.linspace(-1, 1, WIDTH)
SETTINGS = {"layer": 1, "scales": [0.5, (2, None)], b"k": {"big": 1 << 70}}
LAYERS = MODEL.layers
POLICY = Policy(MANIFEST, allow_python=True, loras={}, max_model_len=1)
NO_BUFFERS = wire.Buffers([], memoryview(b""), wire.Bounds())
KEY = Key("key", frozenset(["python"]))
DESCRIPTION = m.Description("toy", MANIFEST.encode(), True, (3, 0), 1, 1 << 30)


def received(block: ServedBlock) -> tuple[m.Code, wire.Buffers]:
    """What a server gets of a block."""
    code, tensors = block.code(DESCRIPTION)
    message = wire.encode(m.RunRequest("0" * 32, [1], block=code), tensors)
    opened = m.take(message, wire.Bounds())
    assert isinstance(opened.body, m.RunRequest)
    assert opened.body.block is not None
    return opened.body.block, opened.buffers


def block_of(probe: Callable[[Any, Any], object]) -> Any:
    """A probe as the worker gets it, by way of its text."""
    served = of_probe(probe, [MODEL, MANIFEST], MODEL)
    assert served.reason is not None, "this one travels as data"
    code, buffers = received(served)
    assert isinstance(code, m.Source), "this one travels as a pickle"
    assert not any(isinstance(outer, m.Pickled) for outer in [*code.free.values(), *code.entries.values()])
    made = POLICY.block(code, buffers, list(served.names), KEY)
    apart = {constant.digest: constant.content for constant in made.constants}
    return load(made.payload, resolve, constants=lambda digest: apart[digest].clone())


def resolve(reference: tuple[str, ...]) -> object:
    match reference:
        case ("model",):
            return MODEL
        case ("module", path):
            return Envoy(MANIFEST, path)
    raise AssertionError(reference)


def printed(model, tracer):
    for step in tracer.iter[:]:
        h = model.layers[SETTINGS["layer"]].output
        print(f"step {step}", h.shape)
        found = {f"row {i}": float(row.norm()) for i, row in enumerate(h)}.save()


def helped(model, tracer):
    """A function in the block, exceptions, and names of modules."""

    def scaled(value, by=2):
        return value * by

    try:
        raise ValueError("x")
    except ValueError as error:
        text = str(error)
    values = [scaled(layer.output, math.pi + sqrt(4)) for layer in model.layers]
    total = sum(values).save()
    big = (SETTINGS[b"k"]["big"] + len(text)).save()


def outside(model, tracer):
    text = """
  as it is
"""
    if not any(LAYERS[0].output.sum() is None for _ in range(2)):
        LAYERS[2].output += VECTOR
    found = [text, SETTINGS["scales"]].save()
    kind = isinstance(VECTOR, torch.Tensor) and torch.float32 is VECTOR.dtype
    kind.save()
    save(len(text))


def enclosing() -> Callable[[Any, Any], None]:
    scale, bias = 3.0, torch.ones(300_000)  # more than travels inside a block

    def closure(model, tracer):
        for _ in tracer.iter[:]:
            y = [model.layers[0].output * scale + bias[:WIDTH] for _ in range(2)][1].save()
            bias[:] += 1
            assert y is not None, "of this step"

    return closure


def annotated(model, tracer):
    number: NoSuchName = 1  # noqa: F821
    number.save()
    assert number, "which has no form as data"


@pytest.mark.parametrize("probe", [printed, helped, outside, enclosing(), annotated], ids=lambda probe: probe.__name__)
def test_text_does_what_the_function_does(probe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found, changed = ran(block_of(probe))
    capsys.readouterr()
    if probe.__name__ == "closure":
        probe = enclosing()
    saved, logits = ran(recompiled(probe, named=True)[0])
    assert [(name, operation) for name, operation, _ in found] == [(name, operation) for name, operation, _ in saved]
    assert all(equal(one, other) for (*_, one), (*_, other) in zip(found, saved, strict=True))
    torch.testing.assert_close(changed, logits, rtol=0, atol=0)
    assert len(saved) >= 1


def test_an_error_stands_where_it_is_written() -> None:
    def probe(model, tracer):
        numbers = [n + 1 for n in range(3)]

        h = model.layers[0].output @ model.layers[0].output

    with pytest.raises(RuntimeError, match="cannot be multiplied") as raised:
        ran(block_of(probe))
    last = [entry for entry in raised.traceback if str(entry.path) == __file__ and entry.name.endswith("probe")][-1]
    assert last.lineno + 1 == probe.__code__.co_firstlineno + 3


def test_each_run_begins_with_what_was_there() -> None:
    rows: list[float] = []

    def probe(model, tracer):
        rows.append(float(model.layers[0].output.sum()))
        count = f"{len(rows)}".save()

    program = block_of(probe)
    rows.append(1.0)  # after it was sent
    for _ in range(2):
        saved, _ = ran(block_of(probe))
        assert saved[0][2] == "2"
    assert ran(program)[0][0][2] == "1"


OF_ANOTHER = ANOTHER.layers[0]


def test_a_module_of_another_model_is_refused_as_before() -> None:
    from nnsight_async import ShippingError

    def probe(model, tracer):
        x = [OF_ANOTHER.output for _ in range(1)]

    with pytest.raises(ShippingError, match="belongs to another model"):
        of_probe(probe, [MODEL, MANIFEST], MODEL)


def forged(**fields: Any) -> m.Source:
    given: dict[str, Any] = {
        "text": "    x = 1\n", "filename": "f.py", "first_line": 1, "lines": (1, 1), "parameters": ["model", "tracer"],
        "free": {}, "entries": {}, "function": "f", "qualname": "f", **fields,
    }  # fmt: skip
    return m.Source(**given)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"text": "    x = = 1\n"}, "invalid syntax"),
        ({"text": ""}, "expected an indented block"),
        ({"text": "    x = 1\nelse:\n    y = 1\n"}, "more than the body"),
        ({"text": "    x = 1\ny = 2\n"}, "more than the body"),
        ({"text": "    nonlocal y\n"}, "nonlocal"),
        ({"text": "    break\n"}, "outside loop"),
        ({"text": "    x = " + "(" * 5000 + ")" * 5000 + "\n"}, "cannot be compiled"),
        ({"text": "    x\0\n"}, "null"),
        ({"parameters": ["a=print()", "b"]}, "names are none"),
        ({"entries": {"a, *b": m.Module(["model"])}}, "names are none"),
        ({"class_name": "A: pass\nclass B"}, "names are none"),
        ({"parameters": ["a", "a"]}, "duplicate argument"),
    ],
)
def test_text_that_is_none_is_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        POLICY.block(forged(**fields), NO_BUFFERS, [], KEY)


def test_nothing_of_a_text_is_run_or_imported_where_it_is_compiled(tmp_path: Any) -> None:
    import sys

    mark = tmp_path / "mark"
    text = f"    import os\n    os.mkdir({str(mark)!r})\n"
    free = {"os": m.Import("os"), "turtledemo": m.Import("antigravity")}
    made = POLICY.block(forged(text=text, free=free), NO_BUFFERS, [], KEY)
    assert made.payload
    assert not mark.exists()
    assert "antigravity" not in sys.modules
    absent = {"x": m.Import("no_such_module_of_anybody")}
    made = POLICY.block(forged(free=absent), NO_BUFFERS, [], KEY)
    with pytest.raises(ImportError):
        load(made.payload, resolve)


def test_there_is_no_pickle_in_it() -> None:
    served = of_probe(enclosing(), [MODEL, MANIFEST], MODEL)
    code, tensors = served.code(DESCRIPTION)
    data = wire.encode(m.RunRequest("0" * 32, [1], block=code), tensors)
    assert b"cloudpickle" not in data
    assert served.payload == b""
    assert [tensor.shape for tensor in tensors] == [(300_000,)]
    assert STEPS == 3
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(code), type=m.Code) == code
