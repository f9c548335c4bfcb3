"""The operations of a forward as a client sees them: listed, printed, named, refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from nnsight_async.errors import LocationError, OutsideBlockError, UnreadableError
from nnsight_async.tree.describe import describe
from nnsight_async.tree.envoy import Envoy
from nnsight_async.tree.manifest import Manifest
from tests.interleave.sourced import Model

NAMES = [
    *("forward_0", "lin_0", "__secret_0", "cos_0", "split_0", "cat_0"),
    *("range_0", "tanh_0", "neg_0", "scale_0", "exp_0", "neg_1", "abs_0"),
]


@pytest.fixture(scope="module")
def model() -> Any:
    """A tree that has travelled, as a client has it."""
    return Envoy(Manifest.decode(describe(Model()).encode()))


def test_operations_have_the_names_of_what_they_call_in_the_order_of_the_text(model: Any) -> None:
    source = model.derived.source
    assert list(source) == NAMES
    assert set(NAMES) <= set(dir(source))
    assert "lin_0" in source
    assert len(source) == len(NAMES)


def test_the_text_shows_each_name_beside_its_line(model: Any) -> None:
    lines = repr(model.derived.source).splitlines()
    assert lines[0].startswith("model.derived.source (tests.interleave.sourced.Derived.forward, line ")
    at = {line.split(" -> ")[0].strip(): line for line in lines if " -> " in line and "+" not in line[:30]}
    assert at["lin_0"].endswith("x = self.lin(x)")
    assert at["scale_0"].endswith("x = scale(x)")
    following = lines[lines.index(at["exp_0"]) + 1 :]
    assert [line.split(" -> ")[0].strip() for line in following[:2]] == ["neg_1", "abs_0"]
    assert (
        int(at["lin_0"].split(" -> ")[1].split()[0])
        == Model().derived.forward.__wrapped__.__wrapped__.__code__.co_firstlineno + 4
    )


def test_html_escapes_the_text_and_folds_what_is_called(model: Any) -> None:
    html = model.derived.source._repr_html_()
    assert "<details>" in html
    assert "model.derived.source.scale_0.source" in html
    assert "-&gt;" in html


def test_functions_that_are_called_have_operations_too(model: Any) -> None:
    nested = model.derived.source.scale_0.source
    assert list(nested) == ["mul_0", "shift_0"]
    assert list(nested.shift_0.source) == ["add_0"]
    assert "tests.interleave.sourced.scale" in repr(nested)


def test_a_callee_that_is_decided_later_is_open(model: Any) -> None:
    operation = model.derived.source.split_0
    assert "decided while the forward runs" in repr(operation.source)
    assert repr(operation.source.anything_0) == "model.derived.source.split_0.source.anything_0"


def test_what_is_not_there_or_not_python(model: Any) -> None:
    with pytest.raises(LocationError, match="has no operation 'lin_00'; did you mean lin_0"):
        _ = model.derived.source.lin_00
    with pytest.raises(LocationError, match=r"has no 'outptu'; did you mean model\.derived\.source\.lin_0\.output\?"):
        _ = model.derived.source.lin_0.outptu
    with pytest.raises(LocationError, match=r"lin_0 has no 'weight'; it has output, input, inputs and source"):
        _ = model.derived.source.lin_0.weight
    with pytest.raises(UnreadableError, match=r"cat_0.source has no operations: torch.cat is not written in Python"):
        _ = model.derived.source.cat_0.source
    with pytest.raises(UnreadableError, match=r"calls a module \(Linear\), whose own .source"):
        _ = model.derived.source.lin_0.source
    with pytest.raises(
        UnreadableError, match=r"model.built.source has no operations: .*sigmoid is not written in Python"
    ):
        _ = model.built.source
    with pytest.raises(OutsideBlockError):
        _ = model.derived.source.lin_0.output


def test_only_values_are_written(model: Any) -> None:
    with pytest.raises(LocationError, match=r"model.derived.source.lin_0 cannot be set; its .output"):
        model.derived.source.lin_0 = 1
    with pytest.raises(LocationError, match=r".source cannot be set"):
        model.derived.source = 1
    with pytest.raises(
        LocationError, match=r"lin_0\.ouput cannot be set; did you mean model\.derived\..*lin_0\.output\?"
    ):
        model.derived.source.lin_0.ouput = 1
    with pytest.raises(LocationError, match=r"lin_0\.value cannot be set; output, input, inputs can"):
        model.derived.source.lin_0.value = 1


def test_one_text_serves_all_modules_of_a_class(model: Any) -> None:
    manifest = describe(Model())
    assert manifest.modules["derived"].source == manifest.modules["other"].source
    names = [source.name for source in manifest.sources.values()]
    assert len(names) == len(set(names))


def test_reads_and_writes_go_to_the_block(model: Any) -> None:
    from nnsight_async.interleave.context import BlockGreenlet
    from tests.tree.conftest import Context

    context = Context(torch.nn.Module())

    def block() -> None:
        source = model.derived.source
        source.scale_0.source.mul_0.output = source.lin_0.input
        _ = source.lin_0.inputs

    greenlet = BlockGreenlet(block, context)
    greenlet.switch()
    assert context.asked == [
        ("read", "model.derived.source.lin_0.input"),
        ("write", "model.derived.source.scale_0.source.mul_0.output", "model.derived.source.lin_0.input"),
        ("read", "model.derived.source.lin_0.inputs"),
    ]


def test_a_client_needs_no_torch() -> None:
    code = "import sys, nnsight_async.tree.source; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
