from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch

from nnsight_async.errors import IsolationError, LocationError, NotComputedError, OutOfOrderError, UnreadableError
from nnsight_async.interleave.context import current
from nnsight_async.interleave.locations import Location
from tests.interleave.sourced import SourceBench, scale, shift
from tests.interleave.toy import WIDTH, output

LIN = "derived", "lin_0"


def rows(number: int, seed: int) -> torch.Tensor:
    return torch.randn(number, WIDTH, generator=torch.Generator().manual_seed(seed))


def read(path: str, operation: str, kind: Any = "output") -> Any:
    return current().read(Location(path, kind, operation))


def write(path: str, operation: str, value: Any, kind: Any = "output") -> None:
    current().write(Location(path, kind, operation), value)


def derived(module: torch.nn.Module, x: torch.Tensor, edits: dict[str, Any] | None = None, times: int = 3) -> Any:
    """The forward of `Derived`, written out, with edits at its operations; returns the values of all of them."""
    seen: dict[str, Any] = {}

    def at(name: str, value: Any) -> Any:
        seen[name] = value = (edits or {}).get(name, lambda v: v)(value)
        return value

    x = at("forward_0", torch.sin(x))
    x = at("lin_0", module.lin(x))
    x = at("__secret_0", x * 3)
    first, second = at("split_0", x.split([WIDTH // 2, WIDTH // 2], dim=-1))
    x = at("cat_0", torch.cat([torch.cos(first), torch.cos(second)], dim=-1))
    for number in range(times):
        x = at(f"tanh_0 ({number})", torch.tanh(x)) + number
    x = at("scale_0", at("scale_0/shift_0", at("scale_0/mul_0", x * 2.0) + 1.0))
    return x + at("exp_0", torch.exp(at("neg_1", -at("abs_0", x.abs())))), seen


def clean(bench: SourceBench) -> None:
    """Nothing is left of any block."""
    sites = bench.interleaver.sites
    assert (sites.entered, sites.inside.watched, len(bench.interleaver.waiting)) == (0, 0, 0)
    assert not any("forward" in vars(module) for module in bench.model.modules())


def test_operations_are_read_in_a_mixed_batch_and_others_do_not_notice():
    bench, seen = SourceBench(), {}
    names = ["forward_0", "lin_0", "__secret_0", "split_0", "cat_0", "scale_0", "abs_0", "neg_1", "exp_0"]
    bench.add(1, lambda m, t: seen.update({name: read("derived", name) for name in names}), 3)
    mine, other = rows(3, 1), rows(2, 2)
    got = bench.step({9: other, 1: mine})
    _, expected = derived(bench.model.derived, mine)
    for name in names:
        torch.testing.assert_close(seen[name], expected[name], msg=name)
    torch.testing.assert_close(got[9], bench.model(other)[-1])
    torch.testing.assert_close(got[1], bench.model(mine)[-1])
    clean(bench)


def test_edits_equal_the_same_edits_in_a_copy_of_the_forward():
    bench, seen = SourceBench(), {}

    def edit(m, t):
        read("derived", "lin_0")[:] += 1
        first, second = read("derived", "split_0")
        write("derived", "split_0", (second, first * 2))
        write("derived", "exp_0", torch.zeros(3, WIDTH))
        seen["out"] = current().read(output("derived"))

    bench.add(1, edit, 3)
    mine, other = rows(3, 1), rows(2, 2)
    got = bench.step({1: mine, 9: other})
    edits = {
        "lin_0": lambda value: value + 1,
        "split_0": lambda value: (value[1], value[0] * 2),
        "exp_0": torch.zeros_like,
    }
    expected, _ = derived(bench.model.derived, mine, edits)
    torch.testing.assert_close(seen["out"], expected)
    torch.testing.assert_close(got[9], bench.model(other)[-1])
    clean(bench)


def test_arguments_are_read_and_edited():
    bench, seen = SourceBench(), {}

    def edit(m, t):
        seen["args"] = read("derived", "scale_0", "inputs")
        write("derived", "scale_0", torch.ones(2, WIDTH), "input")
        seen["scaled"] = read("derived", "scale_0")
        seen["split"] = read("other", "split_0", "inputs")

    bench.add(1, edit, 2)
    bench.step({1: rows(2, 1)})
    assert [type(argument) for argument in seen["args"][0]] == [torch.Tensor]
    assert seen["split"] == (([4, 4],), {"dim": -1})
    torch.testing.assert_close(seen["scaled"], scale(torch.ones(2, WIDTH)))


def test_a_loop_has_several_passages():
    bench, seen = SourceBench(), []

    def block(m, t):
        for _ in range(3):
            read("derived", "tanh_0", "input")
            seen.append(read("derived", "tanh_0"))

    bench.add(1, block, 2)
    mine = rows(2, 1)
    bench.step({1: mine})
    _, expected = derived(bench.model.derived, mine)
    for number in range(3):
        torch.testing.assert_close(seen[number], expected[f"tanh_0 ({number})"])


def test_operations_inside_functions_that_are_called():
    bench, seen = SourceBench(), {}

    def block(m, t):
        seen["lin"] = read("derived", "lin_0")
        read("derived", "scale_0/mul_0")[:] *= 2
        seen["shift"] = read("derived", "scale_0/shift_0/add_0")
        seen["scale"] = read("derived", "scale_0")
        seen["exp"] = read("derived", "exp_0")

    bench.add(1, block, 2)
    mine, other = rows(2, 1), rows(3, 2)
    got = bench.step({1: mine, 9: other})
    _, expected = derived(bench.model.derived, mine, {"scale_0/mul_0": lambda value: value * 2})
    torch.testing.assert_close(seen["shift"], expected["scale_0/shift_0"])
    torch.testing.assert_close(seen["scale"], expected["scale_0"])
    torch.testing.assert_close(seen["exp"], expected["exp_0"])
    torch.testing.assert_close(got[9], bench.model(other)[-1])
    clean(bench)


def test_modules_and_operations_take_turns():
    bench, seen = SourceBench(), {}
    source = "source"  # a block that speaks of it is watched while it waits inside a module

    def block(m, t):
        assert source == "source"
        seen["lin"] = current().read(output("derived.lin"))
        seen["secret"] = read("derived", "__secret_0")
        seen["derived"] = current().read(output("derived"))
        seen["closed"] = read("closed", "doubler_0")
        seen["native"] = read("native", "relu_0")
        seen["root"] = read("", "built_0")

    bench.add(1, block, 1)
    mine = rows(1, 1)
    got = bench.step({1: mine})
    torch.testing.assert_close(seen["secret"], seen["lin"] * 3)
    torch.testing.assert_close(seen["closed"], seen["derived"] * 2)
    torch.testing.assert_close(seen["native"], seen["closed"].relu())
    torch.testing.assert_close(seen["root"][-1], got[1])
    clean(bench)


def test_a_method_that_hands_on_is_looked_through():
    bench, seen = SourceBench(), {}
    bench.add(1, lambda m, t: seen.update(value=read("native", "relu_0")), 2)
    bench.step({1: rows(2, 1)})
    assert (seen["value"] >= 0).all()


def backwards(*steps: tuple[str, str, Any]) -> BaseException | None:
    bench = SourceBench()

    def block(m, t):
        for step in steps:
            read(*step)

    run = bench.add(1, block, 1)
    bench.step({1: rows(1, 1)})
    clean(bench)
    return run.error


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("derived", "lin_0", "output"), ("derived", "forward_0", "output")),
        (("derived", "lin_0", "output"), ("derived", "lin_0", "input")),
        (("derived", "exp_0", "input"), ("derived", "neg_1", "output")),
        (("derived", "exp_0", "input"), ("derived", "scale_0/mul_0", "output")),
        (("derived", "scale_0/shift_0", "output"), ("derived", "scale_0/mul_0", "output")),
        (("derived", "scale_0/shift_0", "output"), ("derived", "scale_0", "input")),
        (("derived", "scale_0", "output"), ("derived", "scale_0/mul_0", "output")),
        (("other", "lin_0", "output"), ("derived", "lin_0", "output")),
    ],
)
def test_backwards_is_out_of_order_at_that_line(first: Any, second: Any):
    error = backwards(first, second)
    assert type(error) is OutOfOrderError
    assert f"model.{second[0]}.source." in str(error)
    assert "already been passed" in str(error)


def test_what_a_loop_or_a_branch_leaves_open_ends_with_the_step():
    assert backwards(("derived", "tanh_0", "output"), ("derived", "tanh_0", "output")) is None
    looped = backwards(*[("derived", "tanh_0", kind) for _ in range(4) for kind in ("input", "output")])
    assert type(looped) is NotComputedError
    branch = backwards(("derived", "neg_0", "output"))
    assert type(branch) is NotComputedError
    assert "model.derived.source.neg_0.output" in str(branch)


def test_names_that_are_not_there():
    error = backwards(("derived", "lin_1", "output"))
    assert type(error) is LocationError
    assert "model.derived.source has no operation 'lin_1'; did you mean lin_0" in str(error)
    nested = backwards(("derived", "scale_0/mull_0", "output"))
    assert type(nested) is LocationError
    assert str(nested) == "model.derived.source.scale_0.source has no operation 'mull_0'; did you mean mul_0?"


@pytest.mark.parametrize(
    ("path", "operation", "reason"),
    [
        ("derived", "cat_0/x_0", "torch.cat is not written in Python"),
        ("derived", "lin_0/linear_0", "it calls a module (Linear), whose own .source lists its operations"),
        ("built", "sigmoid_0", "sigmoid is not written in Python"),
    ],
)
def test_what_is_not_python_is_refused(path: str, operation: str, reason: str):
    error = backwards((path, operation, "output"))
    assert type(error) is UnreadableError
    assert reason in str(error)


def test_values_not_laid_out_by_rows_are_not_shared():
    bench = SourceBench()
    one = bench.add(1, lambda m, t: read("heads", "reshape_0"), 2)
    two = bench.add(2, lambda m, t: read("heads", "len_0"), 2)
    bench.step({1: rows(2, 1), 2: rows(2, 2)})
    assert isinstance(one.error, IsolationError)
    assert "model.heads.source.reshape_0.output" in str(one.error)
    assert two.error is None


def test_tracebacks_go_through_the_lines_of_the_forward():
    bench = SourceBench()
    bench.model.derived.lin.weight.data = torch.zeros(3, 3)
    bench.add(1, lambda m, t: read("derived", "__secret_0"), 2)
    with pytest.raises(RuntimeError) as caught:
        bench.step({1: rows(2, 1)})
    lines = [(frame.name, frame.line) for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert ("forward", "x = self.lin(x)") in lines


def test_every_step_again():
    bench, seen = SourceBench(), []

    def block(m, t):
        seen.extend(read("derived", "scale_0") for _ in t.iter[:])

    run = bench.add(1, block, 2)
    inputs = [rows(2, 1), rows(1, 2), rows(1, 3)]
    for step in inputs:
        bench.step({1: step})
    bench.interleaver.end(run)
    for got, given in zip(seen, inputs, strict=True):
        torch.testing.assert_close(got, derived(bench.model.derived, given)[1]["scale_0"])
    clean(bench)


def test_preempted_rows_are_written_again():
    bench, seen = SourceBench(), {}

    def block(m, t):
        for step in t.iter[:]:
            read("derived", "lin_0")[:] += 10 * (step + 1)

    bench.add(1, block, 2)
    prompt, second, third = rows(2, 1), rows(1, 2), rows(1, 3)
    bench.step({1: prompt})
    bench.step({1: second})
    handle = bench.model.closed.register_forward_pre_hook(lambda _, args: seen.update(x=args[0].clone()))
    bench.step({1: torch.cat([prompt, second, third])}, replayed={1: 3})
    handle.remove()
    added = torch.tensor([10, 10, 20, 30])[:, None]
    expected, _ = derived(bench.model.derived, torch.cat([prompt, second, third]), {"lin_0": lambda v: v + added})
    torch.testing.assert_close(seen["x"], expected)


def test_a_helper_that_no_block_names():
    torch.testing.assert_close(shift(torch.zeros(1), by=1.0), torch.ones(1))
