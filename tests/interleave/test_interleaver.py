from __future__ import annotations

import contextlib
import gc
import linecache
import os
import threading
import time
import warnings

import pytest
import torch

from nnsight_async.errors import (
    BlockTimeoutError,
    GenerationEndedError,
    LocationError,
    NotComputedError,
    OutOfOrderError,
    OutsideBlockError,
    SaveError,
    ShapeError,
    UnreadableError,
    UnsupportedError,
)
from nnsight_async.interleave.console import keep_warnings
from nnsight_async.interleave.context import current, save
from nnsight_async.interleave.interleaver import Interleaver
from nnsight_async.interleave.locations import LOGITS, SAMPLES, Location
from nnsight_async.interleave.views import StreamIn, StreamOut
from tests.interleave.toy import WIDTH, Bench, Toy, order_of, output


def rows(number: int, seed: int) -> torch.Tensor:
    return torch.randn(number, WIDTH, generator=torch.Generator().manual_seed(seed))


def read(path: str) -> torch.Tensor:
    return current().read(output(path))


def test_reads_own_rows_and_leaves_the_others_alone():
    bench, seen = Bench(), {}
    bench.add(1, lambda m, t: seen.update(a=read("layers.1")), 3)
    bench.add(2, lambda m, t: seen.update(b=read("layers.1")), 2)
    first, second = rows(3, 1), rows(2, 2)
    bench.step({1: first, 9: rows(4, 3), 2: second})
    expected = bench.model.layers[1](bench.model.layers[0](first))
    torch.testing.assert_close(seen["a"], expected)
    torch.testing.assert_close(seen["b"], bench.model.layers[1](bench.model.layers[0](second)))
    assert bench.interleaver.sites.entered == 0
    assert not bench.interleaver.waiting


def test_in_place_and_replacement_land_for_that_run_alone():
    bench = Bench()

    def edit(m, t):
        hidden = read("layers.0.mlp")
        hidden += 1
        current().write(output("layers.1.mlp"), torch.zeros(2, WIDTH))

    bench.add(1, edit, 2)
    mine, other = rows(2, 1), rows(2, 2)
    got = bench.step({1: mine, 9: other})
    model = bench.model
    hidden = mine + model.layers[0].mlp(model.layers[0].norm(mine)) + 1
    expected = model.head(model.layers[2](hidden))
    torch.testing.assert_close(got[1], expected[-1])
    torch.testing.assert_close(got[9], model(other)[-1])


def fills(view: torch.Tensor) -> None:
    view[:] = 0


def test_only_what_lies_in_the_model_looks_into_it():
    bench = Bench()
    for event, looks in ((output("layers.1.mlp"), True), (LOGITS, False), (SAMPLES, False)):
        bench.interleaver.waiting.want(event)
        assert bench.interleaver.looks == looks
        bench.interleaver.waiting.drop(event)
    assert not bench.interleaver.looks


BY_MEMORY = {
    "data": lambda hidden: fills(hidden.data),
    "a method of data": lambda hidden: hidden.data.zero_(),
    "numpy": lambda hidden: hidden.numpy().fill(0),
    "dlpack": lambda hidden: torch.from_dlpack(hidden).zero_(),
    "storage": lambda hidden: hidden.untyped_storage().fill_(0),
}


@pytest.mark.parametrize("zero", BY_MEMORY.values(), ids=BY_MEMORY)
def test_a_copy_that_is_changed_by_its_memory_is_written_back(zero):
    """Torch does not count these as changes of the tensor."""
    bench, plain = Bench(), Bench()
    mine, other = rows(2, 1), rows(2, 2)

    def by_memory(m, t):
        zero(read("layers.1"))

    bench.add(1, by_memory, 2)
    plain.add(1, lambda m, t: fills(read("layers.1")), 2)
    got, expected = (each.step({1: mine, 9: other}) for each in (bench, plain))
    torch.testing.assert_close(got, expected)
    assert not torch.allclose(got[1], Bench().step({1: mine})[1])


class Halves(torch.nn.Module):
    """A layer as vLLM has them: the stream is the sum of what it returns."""

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return 2 * hidden, hidden + 1


class OfHalves(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Halves()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden, residual = self.layer(hidden)
        return hidden + residual


def test_a_stream_that_is_changed_by_its_memory_is_written_back_and_another_is_not():
    def changes(m, t):
        current().read_view(output("layer"), StreamOut()).data[-1:] = 7

    def only_looks(m, t):
        t.save(current().read_view(output("layer"), StreamOut()).numpy().sum().item(), "sum")

    bench = on(OfHalves())
    run = bench.add(2, only_looks, 2)
    bench.add(1, changes, 2)
    inputs = {1: rows(2, 1), 2: rows(2, 2)}
    got = bench.step(inputs)
    assert not run.wrote
    torch.testing.assert_close(got[1], torch.full((WIDTH,), 7.0))
    torch.testing.assert_close(got[2], 3 * inputs[2][-1] + 1)


def test_editing_an_input_does_not_reach_others_who_hold_the_tensor():
    bench = Bench()

    def edit(m, t):
        current().read(Location("layers.0.norm", "input"))[:] = 0

    bench.add(1, edit, 2)
    mine = rows(2, 1)
    got = bench.step({1: mine})
    model = bench.model
    hidden = mine + model.layers[0].mlp(model.layers[0].norm(torch.zeros_like(mine)))
    torch.testing.assert_close(got[1], model.head(model.layers[2](model.layers[1](hidden)))[-1])


def test_child_then_parent_output_in_one_step():
    bench, seen = Bench(), {}

    def block(m, t):
        seen["mlp"] = read("layers.1.mlp")
        seen["layer"] = read("layers.1")
        seen["logits"] = current().read(LOGITS)

    bench.add(1, block, 1)
    got = bench.step({1: rows(1, 1)})
    torch.testing.assert_close(seen["logits"][0], got[1])
    assert seen["layer"].shape == (1, WIDTH)


def test_wrong_rows_fail_that_run_only():
    bench = Bench()
    run = bench.add(1, lambda m, t: current().write(output("layers.0"), torch.zeros(5, WIDTH)), 2)
    other = rows(2, 2)
    got = bench.step({1: rows(2, 1), 9: other})
    assert isinstance(run.error, ShapeError)
    assert "model.layers[0].output" in str(run.error)
    assert "(2, 8)" in str(run.error)
    assert "(5, 8)" in str(run.error)
    torch.testing.assert_close(got[9], bench.model(other)[-1])


def test_backwards_is_out_of_order_at_that_line():
    bench, seen = Bench(), {}

    def block(m, t):
        read("layers.2")
        try:
            read("layers.1")
        except OutOfOrderError as error:
            seen["error"] = error
        seen["after"] = read("head")

    bench.add(1, block, 1)
    bench.step({1: rows(1, 1)})
    assert "step 0" in str(seen["error"])
    assert seen["after"].shape == (1, 16)


def test_steps_loop_and_statements_after_it():
    bench, seen = Bench(), []

    def block(m, t):
        for step in t.iter[:]:
            hidden = read("layers.0")
            seen.append((step, hidden.shape[0]))
            save(hidden.sum(), "total")
        seen.append("after")

    run = bench.add(1, block, 3)
    bench.step({1: rows(3, 1)})
    bench.step({1: rows(1, 2)})
    bench.step({1: rows(1, 3)})
    bench.interleaver.end(run)
    assert seen == [(0, 3), (1, 1), (2, 1), "after"]
    assert [(step, [entry.name for entry in entries]) for _, step, entries, _ in bench.reports] == [
        (0, ["total"]),
        (1, ["total"]),
        (2, ["total"]),
        (2, []),
    ]
    assert bench.reports[-1][3]


def test_a_second_loop_does_not_begin_after_the_end():
    bench, seen = Bench(), []

    def block(m, t):
        seen.extend((step, len(read("layers.0"))) for step in t.iter[::2])
        seen.extend((step, len(read("layers.0"))) for step in t.iter[:])
        seen.append("after")

    run = bench.add(1, block, 3)
    bench.step({1: rows(3, 1)})
    bench.step({1: rows(1, 2)})
    bench.interleaver.end(run)
    assert run.error is None
    assert seen == [(0, 3), "after"]


def test_reading_after_the_end():
    bench = Bench()

    def block(m, t):
        for _ in t.iter[:]:
            pass
        read("layers.0")

    run = bench.add(1, block, 1)
    bench.step({1: rows(1, 1)})
    bench.interleaver.end(run)
    assert isinstance(run.error, GenerationEndedError)


def test_a_module_that_does_not_run_in_the_step():
    bench = Bench()
    bench.model.layers[1].unused = torch.nn.Linear(2, 2)
    bench.interleaver.sites.__init__(bench.model, bench.interleaver)
    run = bench.add(1, lambda m, t: read("layers.1.unused"), 1)
    bench.step({1: rows(1, 1)})
    assert isinstance(run.error, NotComputedError)


def test_a_list_saved_once_grows_home():
    bench = Bench()

    def block(m, t):
        kept = save([], "kept")
        for _ in t.iter[:]:
            kept.append(read("layers.0"))

    run = bench.add(1, block, 1)
    for seed in range(3):
        bench.step({1: rows(1, seed)})
    bench.interleaver.end(run)
    operations = [[(entry.operation, len(entry.value)) for entry in entries] for _, _, entries, _ in bench.reports]
    assert operations == [[("set", 1)], [("extend", 1)], [("extend", 1)], []]


def test_preempted_rows_are_written_again():
    bench = Bench()

    def block(m, t):
        for step in t.iter[:]:
            read("layers.0")[:] += 10 * (step + 1)

    bench.add(1, block, 2)
    prompt, second, third = rows(2, 1), rows(1, 2), rows(1, 3)
    bench.step({1: prompt})
    bench.step({1: second})
    seen = {}
    bench.add(2, lambda m, t: seen.update(x=read("layers.1")), 4)
    handle = bench.model.layers[1].register_forward_hook(lambda mod, args, out: seen.update(input=args[0].clone()))
    bench.step({1: torch.cat([prompt, second, third])}, replayed={1: 3})
    handle.remove()
    layer = bench.model.layers[0]
    expected = layer(torch.cat([prompt, second, third])) + torch.tensor([10, 10, 20, 30])[:, None]
    torch.testing.assert_close(seen["input"], expected)


def test_exits_and_endless_catching_do_not_escape():
    bench = Bench()

    def leave(m, t):
        raise SystemExit(3)

    def stubborn(m, t):
        while True:
            with contextlib.suppress(NotComputedError):
                read("layers.1.unused")

    bench.model.layers[1].unused = torch.nn.Linear(2, 2)
    bench.interleaver.sites.__init__(bench.model, bench.interleaver)
    one, two = bench.add(1, leave, 1), bench.add(2, stubborn, 1)
    other = rows(1, 3)
    got = bench.step({1: rows(1, 1), 2: rows(1, 2), 9: other})
    assert isinstance(one.error, SystemExit)
    assert two.finished
    torch.testing.assert_close(got[9], bench.model(other)[-1])


def test_modes_left_on_are_taken_back():
    bench = Bench()

    def block(m, t):
        with torch.inference_mode(False):
            read("layers.0")

    run = bench.add(1, block, 1)
    bench.step({1: rows(1, 1)})
    assert "mode of torch" in str(run.error)


def test_an_endless_loop_is_ended():
    bench = Bench(timeout=0.5)

    def endless(m, t):
        while True:
            pass

    def deaf(m, t):
        for _ in range(3):
            with contextlib.suppress(BaseException):
                endless(m, t)
        endless(m, t)

    one, two = bench.add(1, endless, 1), bench.add(2, deaf, 1)
    other = rows(1, 3)
    got = bench.step({1: rows(1, 1), 2: rows(1, 2), 9: other})
    assert isinstance(one.error, BlockTimeoutError)
    assert isinstance(two.error, BlockTimeoutError)
    torch.testing.assert_close(got[9], bench.model(other)[-1])


def test_a_block_that_catches_everything_is_abandoned():
    bench = Bench(timeout=0.5)
    counts = [0, 0]

    def deaf(m, t):
        while True:
            try:
                while True:
                    try:
                        read("layers.1")
                        while True:
                            counts[0] += 1
                    except BaseException:
                        pass
            except BaseException:
                pass

    def forever(m, t):
        while True:
            with contextlib.suppress(BaseException):
                counts[1] += 1
                time.sleep(1000)

    one, two = bench.add(1, deaf, 1), bench.add(2, forever, 1)
    other = rows(1, 3)
    got = bench.step({1: rows(1, 1), 2: rows(1, 2), 9: other})
    assert isinstance(one.error, BlockTimeoutError)
    assert isinstance(two.error, BlockTimeoutError)
    torch.testing.assert_close(got[9], bench.model(other)[-1])
    stopped = list(counts)
    bench.interleaver.end(one)
    bench.interleaver.end(two)
    del one, two
    bench.runs.clear()
    gc.collect()
    got = bench.step({9: other})
    torch.testing.assert_close(got[9], bench.model(other)[-1])
    assert counts == stopped


@pytest.mark.parametrize("wait", [lambda: time.sleep(1000), threading.Event().wait, lambda: input_of_a_pipe()])
def test_a_block_that_waits_is_ended(wait):
    bench = Bench(timeout=0.5)
    run = bench.add(1, lambda m, t: wait(), 1)
    bench.step({1: rows(1, 1)})
    assert isinstance(run.error, BlockTimeoutError)


def input_of_a_pipe() -> bytes:
    read_end, _ = os.pipe()
    return os.read(read_end, 1)


def test_an_endless_loop_while_it_is_unwound():
    bench = Bench(timeout=0.5)

    def block(m, t):
        try:
            for _ in t.iter[:]:
                pass
        finally:
            while True:
                pass

    run = bench.add(1, block, 1)
    bench.step({1: rows(1, 1)})
    bench.interleaver.end(run)
    assert run.finished


def test_prints_and_warnings_are_kept(capsys):
    bench = Bench()

    def block(m, t):
        print("seen", read("layers.0").shape[0])
        warnings.warn("careful", stacklevel=1)

    run = bench.add(1, block, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        keep_warnings()
        bench.step({1: rows(2, 1)})
    text, warned = run.console.take()
    assert text == "seen 2\n"
    assert [entry[:2] for entry in warned] == [("builtins.UserWarning", "careful")]
    assert capsys.readouterr().out == ""


def test_a_save_that_replaces_another_of_its_step_under_no_name_warns_at_its_line():
    bench = Bench()

    def block(m, t):
        for step in t.iter[:]:
            kept = save(read("layers.0"))
            save(kept), save(kept)  # the same
            save(step, "named"), save(-step, "named")
            t.save(kept + 1)  # another

    run = bench.add(1, block, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        keep_warnings()
        bench.step({1: rows(2, 1)})
        bench.step({1: rows(1, 1)})
    _, ((category, message, filename, line),) = run.console.take()
    assert (category, filename) == ("builtins.UserWarning", __file__)
    assert linecache.getline(filename, line).strip() == "t.save(kept + 1)  # another"
    assert "bound to no name, and replaces" in message


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("itre", LocationError, r"has no 'itre'; did you mean tracer\.iter\?"),
        ("saev", LocationError, r"did you mean tracer\.save\?"),
        ("xyzzy", LocationError, "it has iter, all, stop, save, cache, step, invoke"),
        ("result", OutsideBlockError, r"tracer\.result is that of the whole run: use it after the block"),
        ("saves", OutsideBlockError, "use it after the block"),
        ("scan", UnsupportedError, "TransformersModel"),
    ],
)
def test_wrong_names_of_the_tracer(name, kind, words):
    bench = Bench()
    run = bench.add(1, lambda m, t: getattr(t, name), 1)
    bench.step({1: rows(1, 1)})
    with pytest.raises(kind, match=words):
        raise run.error


def test_a_view_of_an_input_is_edited_for_everyone_who_holds_the_tensor():
    bench = Bench()
    view = StreamIn.of(bench.model.layers[0].norm, middle=True)

    def edit(m, t):
        current().read_view(Location("layers.0.norm", "inputs"), view)[:] += 1

    bench.add(1, edit, 2)
    mine, other = rows(2, 1), rows(1, 2)
    expected_mine, expected_other = bench.model(mine + 1)[-1], bench.model(other)[-1]
    got = bench.step({1: mine, 9: other})
    torch.testing.assert_close(got[1], expected_mine)
    torch.testing.assert_close(got[9], expected_other)


def test_a_kept_reading_is_not_changed_through_a_later_one():
    bench, seen = Bench(), {}

    def block(m, t):
        kept = read("layers.0")
        read("layers.0")[:] = 0
        read("layers.0")[:] += 2
        kept_too = read("layers.0")
        kept_too += 1
        seen.update(kept=kept, after=read("layers.0"))

    bench.add(1, block, 2)
    mine = rows(2, 1)
    got = bench.step({1: mine})
    model = bench.model
    torch.testing.assert_close(seen["kept"], model.layers[0](mine))
    torch.testing.assert_close(seen["after"], torch.full((2, WIDTH), 3.0))
    torch.testing.assert_close(got[1], model.head(model.layers[2](model.layers[1](torch.full((2, WIDTH), 3.0))))[-1])


def test_a_cache_collects_every_step_after_edits():
    bench = Bench()

    def block(m, t):
        save(t.cache(["layers.0", "layers.1.mlp"], include_inputs=True), "cache")
        read("layers.0")[:] += 1

    run = bench.add(1, block, 2)
    prompt, second, other = rows(2, 1), rows(1, 2), rows(3, 3)
    bench.step({9: other, 1: prompt})
    bench.step({1: second, 9: other})
    bench.interleaver.end(run)
    first, layer = bench.reports[0][2][0], bench.model.layers[0]
    assert first.operation == "set"
    assert set(first.value) == {"layers.0.inputs", "layers.0.output", "layers.1.mlp.inputs", "layers.1.mlp.output"}
    torch.testing.assert_close(first.value["layers.0.output"][0], layer(prompt) + 1)
    following = bench.reports[1][2][0]
    assert following.operation == "append"
    torch.testing.assert_close(following.value["layers.0.output"][0], layer(second))
    torch.testing.assert_close(following.value["layers.0.inputs"][0][0][0], second)
    assert [(step, done) for _, step, _, done in bench.reports] == [(0, False), (1, False), (1, True)]
    assert bench.interleaver.sites.entered == 0


def test_edits_of_a_block_that_has_ended_are_repeated_after_a_preemption():
    bench = Bench()

    def block(m, t):
        read("layers.0")[:] += 10

    bench.add(1, block, 2)
    prompt, second, third, seen = rows(2, 1), rows(1, 2), rows(1, 3), {}
    bench.step({1: prompt})
    bench.step({1: second})
    handle = bench.model.layers[1].register_forward_hook(lambda mod, args, out: seen.update(input=args[0].clone()))
    bench.step({1: torch.cat([prompt, second, third])}, replayed={1: 2})
    handle.remove()
    expected = bench.model.layers[0](torch.cat([prompt, second, third])) + torch.tensor([10, 10, 0, 0])[:, None]
    torch.testing.assert_close(seen["input"], expected)


def test_changes_of_several_readings_all_land():
    bench = Bench()

    def block(m, t):
        one, two = read("layers.0"), read("layers.0")
        one[:, 0] = 0
        two[:, 1] = 1

    bench.add(1, block, 2)
    mine = rows(2, 1)
    got = bench.step({1: mine})
    model = bench.model
    hidden = model.layers[0](mine)
    hidden[:, 0], hidden[:, 1] = 0, 1
    torch.testing.assert_close(got[1], model.head(model.layers[2](model.layers[1](hidden)))[-1])


class Stream(torch.nn.Module):
    """A layer as vLLM's are: what it adds to the residual stream is added by the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.mlp(hidden), hidden + residual


class Streams(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Stream()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return sum(self.layer(hidden, hidden * 2))


def on(model: torch.nn.Module) -> Bench:
    bench = Bench()
    bench.model = model.eval()
    bench.interleaver = Interleaver(model, order_of(model), bench._report)
    return bench


def test_changes_of_several_readings_of_a_stream_all_land():
    bench, seen = on(Streams()), {}

    def block(m, t):
        stream = lambda: current().read_view(output("layer"), StreamOut())  # noqa: E731
        one, two = stream(), stream()
        one[:, 0] += 1
        two[:, 1] *= 2
        one[:, 2] = 3
        seen["stream"] = stream()

    bench.add(1, block, 2)
    mine = rows(2, 1)
    got = bench.step({1: mine})
    expected = bench.model(mine)
    expected[:, 0] += 1
    expected[:, 1] *= 2
    expected[:, 2] = 3
    torch.testing.assert_close(seen["stream"], expected)
    torch.testing.assert_close(got[1], expected[-1])


def test_a_later_passage_of_a_shared_module_is_written_again_as_such():
    shared = Toy()
    shared.layers[1].norm = shared.layers[0].norm
    bench, seen = on(shared), {}

    def block(m, t):
        for _ in t.iter[:]:
            read("layers.0")
            read("layers.0.norm")[:] += 10  # that of layer 1

    bench.add(1, block, 2)
    prompt, second = rows(2, 1), rows(1, 2)
    bench.step({1: prompt})
    handle = bench.model.layers[2].register_forward_hook(lambda mod, args, out: seen.update(input=args[0].clone()))
    bench.step({1: torch.cat([prompt, second])}, replayed={1: 2})
    handle.remove()
    first, layer = bench.model.layers[0], bench.model.layers[1]
    hidden = first(torch.cat([prompt, second]))
    torch.testing.assert_close(seen["input"], hidden + layer.mlp(layer.norm(hidden) + 10))


def test_rows_written_again_do_not_part_the_others_from_who_holds_the_tensor():
    bench = Bench()
    entry = Location("layers.0.norm", "inputs")
    view = StreamIn.of(bench.model.layers[0].norm, middle=True)

    def edit(m, t):
        current().read(entry)[0][0][:] += 5

    def edit_for_all(m, t):
        current().read_view(entry, view)[:] += 1

    bench.add(1, edit, 2)
    prompt, second, mine = rows(2, 1), rows(1, 2), rows(2, 3)
    bench.step({1: prompt})
    bench.add(2, edit_for_all, 2)
    got = bench.step({1: torch.cat([prompt, second]), 2: mine}, replayed={1: 2})
    torch.testing.assert_close(got[2], bench.model(mine + 1)[-1])
    torch.testing.assert_close(got[1], bench.model(second)[-1])


def test_the_output_of_the_whole_model():
    bench, seen = Bench(), {}
    bench.add(1, lambda m, t: seen.update(x=read("")), 2)
    mine = rows(2, 1)
    bench.step({1: mine})
    torch.testing.assert_close(seen["x"], bench.model(mine))


def test_a_token_that_does_not_exist_is_refused_before_it_is_looked_up():
    bench = Bench()

    def block(m, t):
        current().write(SAMPLES, torch.tensor([[16]]))

    run = bench.add(1, block, 1)
    bench.step({1: rows(1, 1)})
    assert isinstance(run.error, ShapeError)
    assert "0 to 15" in str(run.error)
    assert int(bench.samples) < 16


def test_names_and_prints_that_cannot_be_sent():
    bench = Bench()
    one = bench.add(1, lambda m, t: save(read("layers.0"), 3), 1)
    two = bench.add(2, lambda m, t: print("\ud800"), 1)
    bench.step({1: rows(1, 1), 2: rows(1, 2)})
    assert isinstance(one.error, SaveError)
    assert two.console.take()[0] == "\\ud800\n"


def test_a_cache_of_what_is_never_called_is_refused():
    bench = Bench()
    run = bench.add(1, lambda m, t: t.cache(["layers.0", "layers"]), 1)
    bench.step({1: rows(1, 1)})
    assert isinstance(run.error, UnreadableError)
    assert "model.layers cannot be read" in str(run.error)


def test_a_cache_that_is_saved_in_every_step_comes_home_whole():
    bench = Bench()

    def block(m, t):
        cache = t.cache(["layers.0"])
        for _ in t.iter[:]:
            read("layers.0")
            save(cache, "cache")

    bench.add(1, block, 1)
    for seed in range(3):
        bench.step({1: rows(1, seed)})
    values = {}
    for _, _, entries, _ in bench.reports:
        for entry in entries:
            values = (
                entry.value if entry.operation == "set" else {k: values.get(k, []) + v for k, v in entry.value.items()}
            )
    assert len(values["layers.0.output"]) == 3


def test_nobody_watches_the_clock_of_what_is_gone():
    """Thousands of interleavers in one process, as in tests, would be as many threads that wake up all the time."""

    def watched() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "nnsight-watchdog"]

    def used() -> None:
        bench = Bench()
        bench.add(1, lambda model, tracer: save(current().read(output("layers.0")), "h"), 1)
        bench.step({1: rows(1, 1)})

    used()
    mine = watched()[-1]
    assert mine.is_alive()
    used()  # whose turn is then the last one
    gc.collect()
    mine.join(60)
    assert not mine.is_alive()
