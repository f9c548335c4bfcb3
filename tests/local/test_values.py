"""What a block sees of the modules of transformers, where that is not what it sees on vLLM."""

from __future__ import annotations

import operator

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from nnsight_async import IsolationError, NNsightError, TransformersModel, save
from nnsight_async.testing import tiny_checkpoint
from nnsight_async.testing.oracle import generation

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
PROMPT, SHORT = [5, 17, 101, 9, 33, 250, 77], [300, 41, 8]
GREEDY = {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True}


def test_a_layer_returns_the_stream_itself(model, hf):
    with model.trace(PROMPT):
        hidden = model.model.layers[1].output.save()
    torch.testing.assert_close(hidden, generation(hf, PROMPT, 1).streams[1], **CLOSE)


def test_logits_of_every_token(model, hf):
    with model.trace(PROMPT):
        logits = model.lm_head.output.save()
    with torch.no_grad():
        torch.testing.assert_close(logits, hf(torch.tensor([PROMPT])).logits[0], **CLOSE)


def test_a_lens(model, hf):
    with model.trace(PROMPT):
        lens = model.lm_head(model.model.norm(model.model.layers[1].resid_post)).save()
    with torch.no_grad():
        expected = hf.lm_head(hf.model.norm(generation(hf, PROMPT, 1).streams[1]))
    torch.testing.assert_close(lens, expected, **CLOSE)


def test_a_cache_in_every_step(model, hf):
    with model.trace(PROMPT, **GREEDY) as tracer:
        cache = tracer.cache([model.model.layers[0], model.model.layers[1].mlp], include_inputs=True).save()
    assert set(cache) == {f"model.layers.{part}.{kind}" for part in ("0", "1.mlp") for kind in ("inputs", "output")}
    passages = cache["model.layers.0.output"]
    assert [len(hidden) for hidden in passages] == [7, 1, 1]
    torch.testing.assert_close(torch.cat(passages), generation(hf, PROMPT, 3).streams[0], **CLOSE)


def test_queries_by_head_keep_the_axis_of_the_batch(model, hf):
    """In a batch they keep the padding too, which the shorter prompt has on its left."""
    attention = model.model.layers[1].self_attn
    with model.trace(**GREEDY) as tracer:
        for prompt in (PROMPT, SHORT):
            with tracer.invoke(prompt):
                q, k = attention.source.apply_rotary_pos_emb_0.output
                attention.source.apply_rotary_pos_emb_0.output = (q * 2, k)
                queries = q.save()
                logits = model.logits.save()
    assert [tuple(q.shape) for q in queries] == [(1, 4, 7, 32), (1, 4, 7, 32)]

    def doubled(module, args, output):
        return output * 2

    hook = hf.model.layers[1].self_attn.q_proj.register_forward_hook(doubled)
    for prompt, found in zip((PROMPT, SHORT), logits, strict=True):
        torch.testing.assert_close(found, generation(hf, prompt, 1).logits, **CLOSE)
    hook.remove()


def test_what_belongs_to_all_prompts_is_read_and_not_changed(model):
    with pytest.raises(IsolationError, match="all prompts of the trace"), model.trace(gradients=False) as tracer:  # noqa: PT012
        with tracer.invoke(PROMPT):
            cosine = model.model.rotary_emb.output[0].save()
        with tracer.invoke([*SHORT, *SHORT, 9]) as second:
            cosine, sine = model.model.rotary_emb.output
            assert cosine.shape == (1, 7, 32)
            model.model.rotary_emb.output = (cosine * 2, sine)


def test_padding_is_nobodys(model, hf):
    """Prompts of unequal lengths, edited at their first token and their last."""
    with model.trace(**GREEDY) as tracer:
        for number, prompt in enumerate((PROMPT, SHORT, PROMPT[:1])):
            with tracer.invoke(prompt):
                logits, rows = save([]), save([])
                for _ in tracer.iter[:]:
                    stream = model.model.layers[1].resid_post
                    rows.append(len(stream))
                    stream[0] *= 1 + number
                    stream[-1] += number
                    logits.append(model.logits)
    assert rows == [[7, 1, 1], [3, 1, 1], [1, 1, 1]]
    for number, prompt in enumerate((PROMPT, SHORT, PROMPT[:1])):
        new: list[int] = []
        for step in range(3):

            def edit(hidden, number=number, prompt=prompt):
                hidden, start = hidden.clone(), len(prompt)
                hidden[0, 0] *= 1 + number
                hidden[0, start - 1] += number
                for row in range(start, hidden.shape[1]):
                    hidden[0, row] = hidden[0, row] * (1 + number) + number
                return hidden

            expected = generation(hf, [*prompt, *new], 1, {1: edit})
            torch.testing.assert_close(logits[number][step], expected.logits, **CLOSE)
            new += expected.ids


def test_drawing_with_a_seed(model):
    def drawn(**settings):
        return model.run(PROMPT, lambda model, tracer: None, max_tokens=8, **settings).result().outputs[0].token_ids

    hot = {"temperature": 2.0, "top_k": 50, "top_p": 0.95}
    assert drawn(seed=1, **hot) == drawn(seed=1, **hot) != drawn(seed=2, **hot)
    assert drawn(temperature=2.0, top_k=1) == drawn(temperature=1.0, top_p=1e-6) == drawn()


def test_why_it_stopped(model):
    plain = model.run(PROMPT, lambda model, tracer: None, max_tokens=8, ignore_eos=True).result().outputs[0]

    def stopped(**settings):
        run = model.run(PROMPT, lambda model, tracer: None, max_tokens=8, **settings)
        output = run.result().outputs[0]
        return output.finish_reason, output.stop_reason, len(output.token_ids)

    third = plain.token_ids[2]
    assert stopped(ignore_eos=True) == ("length", None, 8)
    at = plain.token_ids.index(third) + 1
    assert stopped(ignore_eos=True, stop_token_ids=[third]) == ("stop", third, at)
    assert stopped(ignore_eos=True, stop=[plain.text[:2], "never"])[:2] == ("stop", plain.text[:2])


def test_rows_of_experts_are_nobodys():
    """With one expert per token there are as many as tokens, in another order."""
    folder = tiny_checkpoint("qwen3_moe")
    config = AutoConfig.from_pretrained(folder)
    config.num_experts_per_tok = 1
    loaded = AutoModelForCausalLM.from_pretrained(folder, config=config)
    with TransformersModel(loaded, tokenizer=AutoTokenizer.from_pretrained(folder)) as model:
        with model.trace(SHORT):
            alone = model.logits.save()
        with pytest.raises(IsolationError, match="all prompts of the trace"), model.trace() as tracer:  # noqa: PT012
            with tracer.invoke(PROMPT):
                model.model.layers[0].mlp.experts.act_fn.output[:] = 0
            with tracer.invoke(SHORT):
                model.logits.save()
        with model.trace() as tracer:
            with tracer.invoke(PROMPT):
                rows = model.model.layers[0].mlp.experts.act_fn.output.shape[0]
                shape = save([rows])
                model.model.layers[0].mlp.output[:] = 0
            with tracer.invoke(SHORT):
                beside = model.logits.save()
    assert shape == [2 * len(PROMPT)]  # of both prompts, and the padding
    torch.testing.assert_close(beside, alone, **CLOSE)


def test_a_mode_that_no_text_switches_ends_the_run_with_its_step(model, hf):
    """Code that nobody can look into, as of a library: it is found out at the end of the step, and undone."""

    def probe(view, tracer):
        view.model.layers[0].output.sum()
        operator.attrgetter("set_default_dtype")(torch)(torch.float64)
        view.model.layers[1].output.sum()

    with pytest.raises(NNsightError, match="mode of torch"):
        model.run([5, 17, 101], probe).result()
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("again", [False, True])
def test_a_reading_becomes_a_change(model, hf, again):
    """A tensor that is read once and changed later, before the next location is read."""
    prompt = [5, 17, 101, 9]
    with model.trace(prompt):
        layer = model.model.layers[0]
        first = layer.output
        second = layer.output if again else first
        was = first.clone().save()
        second.mul_(0)
        now = layer.output.save()
        after = model.model.layers[1].output.save()
        kept = first.save()
    assert was.abs().sum() > 0
    assert not now.any()
    assert torch.equal(kept, was if again else now)
    with model.trace(prompt):
        model.model.layers[0].output = torch.zeros_like(was)
        expected = model.model.layers[1].output.save()
    torch.testing.assert_close(after, expected)
