"""Every form of a prompt means the same tokens, and what is no prompt is told at the call."""

from __future__ import annotations

import asyncio
from copy import copy
from typing import Any

import numpy as np
import pytest
import torch

from nnsight_async import VLLM
from nnsight_async.testing.oracle import generation

TEXT = "A cat on the roof"
STEPS = 4
GREEDY: dict[str, Any] = {"max_tokens": STEPS, "temperature": 0.0, "ignore_eos": True}
CHAT = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "go"},
]


@pytest.fixture(scope="session")
def sync(model: VLLM) -> VLLM:
    """The same engine behind a model of mode "sync"."""
    twin = copy(model)
    twin.mode = "sync"
    return twin


def ids(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def traced(model: Any, prompt: Any) -> tuple[list[int], int]:
    """What is generated, and how many tokens the block saw of the prompt."""
    with model.trace(prompt, **GREEDY) as tracer:
        rows = model.model.layers[0].resid_post.shape[0].save()
    return ids(tracer.result), rows


TENSORS = {
    "ids": lambda tokens: tokens,
    "tuple": tuple,
    "numpy integers": lambda tokens: [np.int64(token) for token in tokens],
    "1-D tensor": torch.tensor,
    "2-D tensor of one row": lambda tokens: torch.tensor([tokens]),
    "numpy array": np.array,
    "vLLM's ids": lambda tokens: {"prompt_token_ids": tokens},
    "input_ids alone": lambda tokens: {"input_ids": torch.tensor([tokens])},
    "a mask of ones": lambda tokens: {"input_ids": tokens, "attention_mask": [1] * len(tokens)},
    "a mask that selects": lambda tokens: {
        "input_ids": torch.tensor([[9, 9, *tokens, 7]]),
        "attention_mask": torch.tensor([[0, 0, *([1] * len(tokens)), 0]]),
    },
}


@pytest.mark.parametrize("form", TENSORS)
def test_forms_of_ids(model, hf, form):
    tokens = [5, 17, 101, 9, 33, 250]
    assert traced(model, TENSORS[form](tokens)) == (generation(hf, tokens, STEPS).ids, len(tokens))


TEXTS = {
    "str": lambda tokenizer: TEXT,
    "vLLM's text": lambda tokenizer: {"prompt": TEXT},
    "a tokenizer's output": lambda tokenizer: tokenizer(TEXT),
    "a tokenizer's tensors": lambda tokenizer: tokenizer(TEXT, return_tensors="pt"),
    "a tokenizer's dict": lambda tokenizer: dict(tokenizer(TEXT)),
    "without a mask": lambda tokenizer: tokenizer(TEXT, return_attention_mask=False, return_tensors="pt"),
    "padded": lambda tokenizer: tokenizer(TEXT, padding="max_length", max_length=40, return_tensors="pt"),
}


@pytest.mark.parametrize("form", TEXTS)
def test_forms_of_text(model, hf, form):
    tokens = model.tokenizer(TEXT)["input_ids"]
    assert traced(model, TEXTS[form](model.tokenizer)) == (generation(hf, tokens, STEPS).ids, len(tokens))


def test_a_chat_goes_through_its_template(model, hf):
    tokens = model.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert traced(model, CHAT) == (generation(hf, tokens, STEPS).ids, len(tokens))


def test_generate_takes_a_list_of_any_of_them(model, hf):
    tokens = model.tokenizer(TEXT)["input_ids"]
    given = [TEXT, tokens, torch.tensor(tokens), model.tokenizer(TEXT), CHAT]
    outputs = model.generate(given, **GREEDY).result()
    expected = generation(hf, tokens, STEPS).ids
    assert list(map(ids, outputs))[:4] == [expected] * 4
    for one in (TEXT, tokens, CHAT, torch.tensor(tokens)):
        assert len(model.generate(one, **GREEDY).result()) == 1


EMPTY = ["", [], (), torch.tensor([]), {}, {"prompt": ""}, {"prompt_token_ids": []}, [[]], {"input_ids": [[]]}]


@pytest.mark.parametrize("prompt", [*EMPTY, {"input_ids": [5, 6], "attention_mask": [0, 0]}])
def test_an_empty_prompt(model, prompt):
    with pytest.raises(ValueError, match="the prompt is empty"):
        model.trace(prompt)


LISTS = [
    ["one", "two"],
    ["one"],
    [[5, 6], [7, 8]],
    torch.tensor([[5, 6], [7, 8]]),
    [torch.tensor([5, 6]), torch.tensor([7])],
    [CHAT, CHAT],
    [{"prompt": "one"}],
    {"input_ids": [[5, 6], [7, 8]]},
]


@pytest.mark.parametrize("prompt", LISTS)
def test_a_list_of_prompts(model, prompt):
    with pytest.raises(ValueError, match=r"tracer\.invoke\(prompt\).*model\.generate\(prompts\)"):
        model.trace(prompt)


@pytest.mark.backends("vllm")
def test_what_is_no_prompt(model):
    for wrong in (None, 5, b"bytes", object(), [5, 6.5], [True], torch.tensor([0.5])):
        with pytest.raises(TypeError, match=r"a prompt is|token ids are"):
            model.trace(wrong)
    with pytest.raises(ValueError, match="a chat is a list"):
        model.trace(CHAT[0])
    with pytest.raises(ValueError, match="this one has text"):
        model.trace({"text": "hello"})
    with pytest.raises(ValueError, match="3 entries for 2"):
        model.trace({"input_ids": [5, 6], "attention_mask": [1, 1, 1]})
    with pytest.raises(ValueError, match="pixel_values would be ignored"):
        model.trace({"input_ids": [5, 6], "pixel_values": torch.ones(3)})


WRONG = {
    "temperature": (-1.0, "temperature must be non-negative"),
    "top_p": (2.0, r"top_p must be in \(0, 1\]"),
    "max_tokens": (0, "max_tokens must be at least 1"),
    "n": (0, "n must be at least 1"),
}


@pytest.mark.backends("vllm", "served")
@pytest.mark.parametrize("name", WRONG)
def test_bad_sampling_values_get_the_message_of_vllm(model, name):
    value, message = WRONG[name]
    for call in (model.trace, model.generate, lambda *given, **more: model.run(*given, print_nothing, **more)):
        with pytest.raises(ValueError, match=message):
            call([5, 6], **{name: value})


def print_nothing(model: Any, tracer: Any) -> None:
    pass


@pytest.mark.backends("vllm")
def test_values_of_a_wrong_type_do_not_reach_the_engine(model):
    wrong = {
        "max_tokens": "3",
        "temperature": "0",
        "stop": 5,
        "seed": "seven",
        "ignore_eos": "no",
        "logit_bias": {"3": 1},
        "priority": "high",
    }
    for name, value in [*wrong.items(), ("priority", 1.5), ("priority", 1 << 63)]:
        with pytest.raises(TypeError, match=name):
            model.trace([5, 6], **{name: value})
    for more in ({"prompt_token_ids": [5, 6.5]}, {"prompt_token_ids": ["5"]}, {"prompt": "hi", "cache_salt": 7}):
        with pytest.raises((TypeError, ValueError), match=r"token ids|one prompt|cache_salt"):
            model.trace(more)
    with pytest.raises(TypeError, match="did you mean 'max_tokens'"):
        model.generate([5, 6], max_token=3)


# -- generate, in its forms


def test_one_setting_under_two_names(model, hf):
    words = r"both max_tokens= and max_new_tokens=, which are one setting"
    with pytest.raises(TypeError, match=rf"trace\(\) got {words}"):
        model.trace([5], max_tokens=2, max_new_tokens=3)
    with pytest.raises(TypeError, match=rf"invoke\(\) got {words}"), model.trace() as tracer:
        tracer.invoke([5], max_new_tokens=2, max_tokens=2)
    with model.trace(max_new_tokens=3, temperature=0.0, ignore_eos=True) as tracer, tracer.invoke([5], max_tokens=2):
        pass
    assert [ids(output) for output in tracer.result] == [generation(hf, [5], 2).ids]


def test_generate_is_a_list_of_outputs(sync, hf):
    given = [[at, 9, 10] for at in range(4, 40)]
    outputs = sync.generate(given, **GREEDY)
    assert type(outputs) is list
    assert list(map(ids, outputs)) == [generation(hf, prompt, STEPS).ids for prompt in given]
    assert [list(output.prompt_token_ids) for output in outputs] == given


def test_generate_as_a_with(sync, hf):
    with sync.generate([5, 6, 7], **GREEDY) as tracer:
        logits = sync.logits.save()
    expected = generation(hf, [5, 6, 7], STEPS)
    assert ids(tracer.result) == expected.ids
    torch.testing.assert_close(logits[0], expected.logits[0], rtol=1e-4, atol=1e-4)
    settings = {"max_new_tokens": 2, "temperature": 0.0}
    with sync.generate(**settings) as tracer, tracer.invoke([5, 6, 7]):
        logits = sync.logits.save()
    assert ids(tracer.result[0]) == expected.ids[:2]
    with pytest.raises(ValueError, match="needs prompts"):
        sync.generate(**settings)
    with pytest.raises(ValueError, match="one prompt"), sync.generate([[5, 6], [7]], **settings):
        pass


async def test_generate_awaited_and_as_an_async_with(model, hf):
    expected = generation(hf, [5, 6, 7], STEPS)
    [output] = await model.generate([5, 6, 7], **GREEDY)
    assert ids(output) == expected.ids
    task = asyncio.create_task(model.generate([[5, 6, 7]] * 3, **GREEDY))
    several = asyncio.gather(model.generate([5, 6, 7], **GREEDY), model.generate([5, 6, 7], **GREEDY))
    assert list(map(ids, await task)) == [expected.ids] * 3
    assert [ids(output) for [output] in await several] == [expected.ids] * 2
    async with model.generate([5, 6, 7], **GREEDY) as tracer:
        logits = model.logits.save()
    torch.testing.assert_close((await logits)[0], expected.logits[0], rtol=1e-4, atol=1e-4)
    assert ids(await tracer.result) == expected.ids
    async with model.generate(**GREEDY) as tracer, tracer.invoke([5, 6, 7]):
        logits = model.logits.save()
    assert (await logits).shape == (1, 512)
    with pytest.raises(ValueError, match="takes one prompt"):
        async with model.generate([[5, 6], [7]], **GREEDY):
            pass


@pytest.mark.backends("vllm")
def test_thousands_of_prompts(sync):
    outputs = sync.generate([[4 + at % 500] for at in range(2500)], max_tokens=1, temperature=0.0, detokenize=False)
    assert [output.prompt_token_ids[0] for output in outputs] == [4 + at % 500 for at in range(2500)]


def test_the_first_error_of_plain_prompts_is_raised(sync):
    with pytest.raises(ValueError, match="vocab"):
        sync.generate([[5], [100_000], [7]], **GREEDY)
