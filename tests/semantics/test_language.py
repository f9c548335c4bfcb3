"""What a block may be written with, beyond reading and writing a location."""

from __future__ import annotations

import traceback
import warnings

import pytest
import torch

from nnsight_async import BlockTimeoutError, OutOfOrderError, UnreadableError, save
from nnsight_async.testing.oracle import generation

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
PROMPT = [5, 17, 101, 9, 33, 250, 77]


@pytest.mark.backends("vllm")
def test_a_module_applied_to_values_of_the_block(model, hf):
    """The logit lens: final norm and unembedding of the stream in the middle."""
    with model.trace(PROMPT, max_tokens=1):
        stream = model.model.layers[1].resid_post
        lens = model.logits_processor(model.lm_head, model.model.norm(stream)).save()
    expected = generation(hf, PROMPT, 1).streams[1]
    with torch.no_grad():
        expected = hf.lm_head(hf.model.norm(expected))
    torch.testing.assert_close(lens, expected, **CLOSE)


@pytest.mark.backends("vllm")
def test_attention_cannot_be_applied_by_hand(model):
    with pytest.raises(NotImplementedError, match="key-value cache"), model.trace(PROMPT, max_tokens=1):
        model.model.layers[1](model.model.layers[0].output[0])


@pytest.mark.backends("vllm")
def test_a_cache_of_chosen_modules_in_every_step(model, hf):
    with model.trace(PROMPT, max_tokens=3, temperature=0.0, ignore_eos=True) as tracer:
        cache = tracer.cache([model.model.layers[0], model.model.layers[1].mlp], include_inputs=True).save()
    assert set(cache) == {f"model.layers.{part}.{kind}" for part in ("0", "1.mlp") for kind in ("inputs", "output")}
    passages = cache["model.layers.0.output"]
    assert [hidden.shape[0] for hidden, _ in passages] == [len(PROMPT), 1, 1]
    stream = torch.cat([hidden + residual for hidden, residual in passages])
    torch.testing.assert_close(stream, generation(hf, PROMPT, 3).streams[0], **CLOSE)


@pytest.mark.backends("vllm")
def test_a_cache_of_everything(model):
    with model.trace(PROMPT, max_tokens=1) as tracer:
        cache = tracer.cache().save()
    assert {"model.layers.3.output", "model.norm.output", "model.layers.0.self_attn.attn.output"} <= set(cache)


@pytest.mark.backends("vllm")
def test_a_cache_of_what_cannot_be_read(model):
    for modules, why in (
        ([model.lm_head], "read model.logits"),
        ([model.model.layers[0], model.model.layers[2].self_attn.rotary_emb], r"read it there"),
        ([model.model.layers], "read its items"),
    ):
        with pytest.raises(UnreadableError, match=why), model.trace(PROMPT, max_tokens=1) as tracer:
            tracer.cache(modules).save()


def test_renamed_modules_answer_to_both_names(model):
    with model.trace(PROMPT, max_tokens=1):
        by_alias = model.blocks[1].attention.output.save()
    with model.trace(PROMPT, max_tokens=1):
        by_name = model.model.layers[1].self_attn.output.save()
    torch.testing.assert_close(by_alias, by_name)


def test_prints_come_home(model, capsys):
    with model.trace(PROMPT, max_tokens=2, ignore_eos=True) as tracer:
        for _ in tracer.iter[:]:
            print("rows", model.model.layers[0].resid_post.shape[0])
    assert capsys.readouterr().out == "rows 7\nrows 1\n"


def test_warnings_come_home(model):
    def probe(model, tracer):
        import warnings

        warnings.warn("a rare thing", stacklevel=1)

    with pytest.warns(UserWarning, match="a rare thing") as caught:
        model.run(PROMPT, probe, max_tokens=1).result()
    assert caught[0].filename == __file__


@pytest.mark.backends("vllm")
def test_an_endless_block_ends_and_others_go_on(model, hf):
    def endless(model, tracer):
        while True:
            pass

    with pytest.raises(BlockTimeoutError, match="block_timeout"):
        model.run(PROMPT, endless, max_tokens=2).result()
    (output,) = model.run(PROMPT, lambda model, tracer: None, max_tokens=2, temperature=0.0).result().outputs
    assert list(output.token_ids) == generation(hf, PROMPT, 2).ids


def test_conditions_on_values_and_locals_across_steps(model, hf):
    """Steer only after the first time that the drawn token repeats the one before."""
    with model.trace(PROMPT, max_tokens=6, temperature=0.0, ignore_eos=True) as tracer:
        before, steered = None, save([])
        for step in tracer.iter[:]:
            if before is not None and step % 2:
                model.logits[:] = 0
                model.logits[:, before + 1] = 1
                steered.append(step)
            before = int(model.samples)
    ids = list(tracer.result.outputs[0].token_ids)
    assert steered == [1, 3, 5]
    assert all(ids[step] == ids[step - 1] + 1 for step in steered)
    assert ids[0] == generation(hf, PROMPT, 1).ids[0]


def test_try_and_finally(model):
    with model.trace(PROMPT, max_tokens=2, ignore_eos=True) as tracer:
        caught, finished = save([]), save([])
        for _ in tracer.iter[:]:
            try:
                model.model.layers[2].output
                model.model.layers[1].output
            except OutOfOrderError as error:
                caught.append(str(error))
            finally:
                finished.append(True)
    assert len(caught) == len(finished) == 2
    assert "in step 1" in caught[1]


def test_helpers_closures_recursion_and_classes(model, hf):
    scale = 0.5

    def damp(hidden, times):
        if times:
            hidden *= scale
            damp(hidden, times - 1)

    with model.trace(PROMPT, max_tokens=1, temperature=0.0):

        class Scaled(torch.nn.Module):
            def __init__(self, scale):
                super().__init__()
                self.scale = scale

        class Probe(Scaled):
            def __init__(self):
                super().__init__(1.0)
                self.kind = __class__

            def score(self, hidden):
                return float(hidden[-1].sum() * self.scale)

        damp(model.model.layers[1].resid_post, 2)
        score = save(Probe().score(model.model.layers[1].resid_post))
        logits = model.logits.save()
    expected = generation(hf, PROMPT, 1, {1: lambda hidden: hidden * 0.25})
    torch.testing.assert_close(logits, expected.logits, **CLOSE)
    assert score == pytest.approx(float(expected.streams[1][-1].sum()), rel=1e-3, abs=1e-3)


def test_some_steps_only(model):
    with model.trace(PROMPT, max_tokens=6, temperature=0.0, ignore_eos=True) as tracer:
        seen = save([])
        for step in tracer.iter[1:3]:
            seen.append(step)
        for step in tracer.iter[4]:
            seen.append(step)
        for step in tracer.all():
            seen.append(step)
    assert seen == [1, 2, 4, 5]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (slice(2, None), [2, 3, 4, 5]),
        (slice(None, 2), [0, 1]),
        (slice(None, None, 2), [0, 2, 4]),
        (slice(4, 9), [4, 5]),
        (slice(3, 1), []),
        (slice(7, None), []),
        ([4, 0, 4], [0, 4]),
        (torch.tensor([1, 3]), [1, 3]),
    ],
)
def test_steps_that_are_chosen(model, steps, expected):
    with model.trace(PROMPT, max_tokens=6, temperature=0.0, ignore_eos=True) as tracer:
        seen = save([])
        for step in tracer.iter[steps]:
            seen.append((step, len(model.model.layers[0].resid_post)))
    assert seen == [(step, 1 if step else len(PROMPT)) for step in expected]


@pytest.mark.parametrize("steps", [-1, slice(-2, None), slice(None, -1), [0, -1], slice(0, None, -1), slice(0, 4, 0)])
def test_steps_from_the_end_are_refused_at_that_line(model, steps):
    def probe(model, tracer):
        for _ in tracer.iter[steps]:
            model.logits.save()

    with pytest.raises(ValueError, match=r"not from the end|the stride is 1 or more") as caught:
        model.run(PROMPT, probe, max_tokens=6).result()
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.filename, last.line) == (__file__, "for _ in tracer.iter[steps]:")


def test_what_is_written_instead_of_steps_from_the_end(model):
    with model.trace(PROMPT, max_tokens=6, temperature=0.0, ignore_eos=True) as tracer:
        every = save([])
        for _ in tracer.iter[:]:
            last = model.samples.save()
            every.append(model.samples)
    ids = list(tracer.result.outputs[0].token_ids)
    assert int(last) == ids[-1]
    assert [int(drawn) for drawn in every[-2:]] == ids[-2:]


def test_comprehensions_that_read(model, hf):
    """Each has a scope of its own, which sees the block's names."""
    layers = model.model.layers
    with model.trace(PROMPT, max_tokens=1, temperature=0.0):
        scale, layer = 2.0, "mine"
        by_number = {n: layers[n].resid_post[-1] * scale for n in range(2)}
        means = save([float(layer.resid_post.mean()) for layer in layers[2:]])
        kept = save([by_number[n] for n in by_number if n])
        layer.save()
        last = save([n for n in (number for number in range(4)) if n > 2])
    streams = generation(hf, PROMPT, 1).streams
    assert means == pytest.approx([float(stream.mean()) for stream in streams[2:]], rel=1e-3, abs=1e-5)
    torch.testing.assert_close(kept[0], streams[1][-1] * 2.0, **CLOSE)
    assert (layer, last) == ("mine", [3])


def test_a_generator_that_reads_when_it_is_asked(model, hf):
    def streams(layers):
        for layer in layers:
            yield layer.resid_post

    with model.trace(PROMPT, max_tokens=1, temperature=0.0):
        read = streams(model.model.layers)
        first = next(read).save()
        rest = save([float(stream.sum()) for stream in read])
    expected = generation(hf, PROMPT, 1).streams
    torch.testing.assert_close(first, expected[0], **CLOSE)
    assert rest == pytest.approx([float(stream.sum()) for stream in expected[1:]], rel=1e-3, abs=1e-2)


def test_nested_functions_share_the_names_of_the_function_around_them(model, hf):
    with model.trace(PROMPT, max_tokens=3, temperature=0.0, ignore_eos=True) as tracer:

        def counter():
            seen = []

            def see(number):
                nonlocal seen
                seen = [*seen, number]
                return list(seen)

            return see

        see = counter()
        for _ in tracer.iter[:]:
            ids = save(see(int(model.samples)))
    assert ids == generation(hf, PROMPT, 3).ids


def test_an_early_return_of_a_probe_leaves_the_generation_alone(model, hf):
    def probe(model, tracer):
        for step in tracer.iter[:]:
            logits = model.logits.save()
            if step == 1:
                return
        never = save(True)

    output = model.run(PROMPT, probe, max_tokens=4, temperature=0.0, ignore_eos=True).result()
    expected = generation(hf, PROMPT, 4)
    assert list(output.outputs[0].token_ids) == expected.ids
    assert list(output.saves) == ["logits"]
    torch.testing.assert_close(output.saves["logits"][0], expected.logits[1], **CLOSE)


def test_a_read_that_fails_and_is_handled_leaves_the_rest_of_the_block(model, hf):
    expected = generation(hf, PROMPT, 2)
    with model.trace(PROMPT, max_tokens=2, temperature=0.0, ignore_eos=True) as tracer:
        words, order = save([]), save([])
        for step in tracer.iter[:]:
            try:
                model.model.layers[1].resid_post
                model.model.layers[0].output
            except OutOfOrderError as error:
                words.append(type(error).__name__)
                stream = model.model.layers[2].resid_post.save()
            else:
                order.append("else")
            finally:
                order.append(step)
            try:
                model.model.layers[3].no_such
            except AttributeError as error:
                words.append(type(error).__name__)
            logits = model.logits.save()
    assert (words, order) == (["OutOfOrderError", "LocationError"] * 2, [0, 1])
    torch.testing.assert_close(stream, expected.streams[2][-1:], **CLOSE)
    torch.testing.assert_close(logits[0], expected.logits[1], **CLOSE)


def test_what_is_raised_while_an_error_is_handled_brings_that_along(model):
    with pytest.raises(KeyError, match="instead") as caught, model.trace(PROMPT, max_tokens=1):  # noqa: PT012
        try:
            model.model.layers[1].output
            model.model.layers[0].output
        except OutOfOrderError:
            raise KeyError("instead")  # noqa: B904
    assert isinstance(caught.value.__context__, OutOfOrderError)


def test_finally_and_context_managers_end_with_the_request(model, capsys):
    """A block that is stopped is unwound like any function."""
    with model.trace(PROMPT, max_tokens=50, temperature=0.0, ignore_eos=True) as tracer:
        left = save([])

        class Scope:
            def __enter__(self):
                return "inside"

            def __exit__(self, *error):
                left.append(error[0] is None)

        with Scope() as where:
            try:
                for step in tracer.iter[:]:
                    if step == 1:
                        tracer.stop()
            finally:
                print(where, step)
    assert capsys.readouterr().out == "inside 1\n"
    assert left == [False]
    assert len(tracer.result.outputs[0].token_ids) == 2


def test_loops_that_a_value_ends(model, hf):
    expected = generation(hf, PROMPT, 1)
    with model.trace(PROMPT, max_tokens=1, temperature=0.0):
        sums, count = [], 0
        while True:
            sums.append(float(model.model.layers[count].resid_post[-1].norm()))
            count += 1
            if count == 4 or sums[-1] > 1e9:
                break
        else:
            count = -1
        norms = save(list(sums))
        match model.logits.shape:
            case (1, vocabulary):
                width = save(vocabulary)
            case _:
                width = save(0)
        largest = save(max(norms))
    assert norms == pytest.approx([float(stream[-1].norm()) for stream in expected.streams], rel=1e-3)
    assert (width, largest) == (expected.logits.shape[1], max(norms))


def test_names_of_a_block_are_its_own(model):
    """Only what is saved is bound here; what the block rebinds or deletes stays as it was."""
    kept, gone, rows = "before", "before", [1]
    with model.trace(PROMPT, max_tokens=1):
        kept = "inside"
        rows.append(2)
        seen = save(f"{gone} {kept} {rows}")
        del gone
    assert (kept, gone, rows) == ("before", "before", [1])  # noqa: F821  it is there
    assert seen == "before inside [1, 2]"


def test_warnings_and_prints_of_helpers_come_home_with_their_own_place(model, capsys):
    def helper(number):
        print("number", number)
        warnings.warn(f"number {number}", RuntimeWarning, stacklevel=1)

    with pytest.warns(RuntimeWarning, match="number 7") as caught, model.trace(PROMPT, max_tokens=1):
        helper(model.model.layers[0].resid_post.shape[0])
    assert capsys.readouterr().out == "number 7\n"
    assert [(found.filename, found.lineno) for found in caught] == [(__file__, helper.__code__.co_firstlineno + 2)]
