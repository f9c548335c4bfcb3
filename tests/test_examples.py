"""The examples, on a tiny model of random weights, against transformers in float32."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from nnsight_async.testing import hf_model
from nnsight_async.testing.oracle import generation
from nnsight_async.testing.vision import tiny_vision_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from nnsight_async import VLLM

EXAMPLES = Path(__file__).parents[1] / "examples"
SEEING = ("image_patches.py",)
"""Examples that take a model which sees."""
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


@pytest.fixture(scope="module")
def hf() -> Any:
    return hf_model("llama")


def text(model: VLLM, ids: list[int]) -> str:
    """As vLLM has it, which leaves out a character that has only begun."""
    return model.tokenizer.decode(ids).rstrip("\N{REPLACEMENT CHARACTER}")


async def test_patching_gives_the_logit_difference_that_hooks_give(model: VLLM, example: Any, hf: Any) -> None:
    clean, corrupted = "The boat was red", "The boat was big"
    grid = await example("activation_patching").main(model, clean, corrupted, last=4)

    good, bad = model.tokenizer(clean).input_ids, model.tokenizer(corrupted).input_ids
    right, wrong = generation(hf, good, 1), generation(hf, bad, 1)
    wanted, other = right.ids[0], wrong.ids[0]
    assert wanted != other
    low, high = (run.logits[0, wanted] - run.logits[0, other] for run in (wrong, right))
    expected = torch.empty(len(hf.model.layers), 4)
    for layer, stream in enumerate(right.streams):
        for column, position in enumerate(range(len(bad) - 4, len(bad))):

            def patch(hidden: torch.Tensor, row: torch.Tensor = stream, position: int = position) -> torch.Tensor:
                return hidden.index_copy(1, torch.tensor([position]), row[None, position : position + 1])

            logits = generation(hf, bad, 1, {layer: patch}).logits[0]
            expected[layer, column] = (logits[wanted] - logits[other] - low) / (high - low)
    assert not torch.equal(expected.round(), expected)
    torch.testing.assert_close(grid, expected, rtol=1e-3, atol=1e-3)


async def test_the_lens_is_the_final_norm_and_head_on_the_stream(model: VLLM, example: Any, hf: Any) -> None:
    prompt = "The boat was red"
    guesses, probabilities = await example("logit_lens").main(model, prompt, max_tokens=4)

    ids = model.tokenizer(prompt).input_ids
    plain = generation(hf, ids, 4)
    with torch.no_grad():
        lens = [hf.lm_head(hf.model.norm(stream)).softmax(-1).max(-1) for stream in plain.streams]
    assert guesses.shape == (len(hf.model.layers), len(ids) + 3)
    assert torch.equal(guesses, torch.stack([top.indices for top in lens]))
    assert guesses[-1, -4:].tolist() == plain.ids
    torch.testing.assert_close(probabilities, torch.stack([top.values for top in lens]), **CLOSE)


async def test_every_strength_steers_as_a_hook_does(model: VLLM, example: Any, hf: Any) -> None:
    steering = example("steering")
    strengths = (-2.0, 0.0, 1.0)

    runs = await steering.main(model, strengths, word="a", other="e", max_tokens=6)

    layer, ids = len(hf.model.layers) // 2, model.tokenizer(steering.PROMPT).input_ids
    ends = [
        [generation(hf, model.tokenizer(text).input_ids, 1).streams[layer][-1] for text in texts]
        for texts in zip(*steering.PAIRS, strict=True)
    ]
    vector = torch.stack(ends[0]).mean(0) - torch.stack(ends[1]).mean(0)
    one, other = (model.tokenizer(word).input_ids[0] for word in "ae")
    for run, strength in zip(runs, strengths, strict=True):
        expected = generation(hf, ids, 6, {layer: lambda hidden, strength=strength: hidden + strength * vector})
        assert (run.strength, run.text) == (strength, text(model, expected.ids))
        assert run.difference == pytest.approx(float(expected.logits[0, one] - expected.logits[0, other]), abs=1e-3)
    assert len({run.text for run in runs}) == 3


async def test_edits_steer_who_asks_and_score_everybody(model: VLLM, example: Any, hf: Any) -> None:
    edits, steps = example("edits"), 4

    answers = await edits.main(model, strength=2.0, max_tokens=steps)

    assert model.edits == ()
    layer = len(hf.model.layers) // 2
    vector = await edits.direction(model, layer)
    assert [(answer.prompt, bool(answer.edits)) for answer in answers] == [
        (prompt, steered) for prompt in edits.PROMPTS for steered in (False, True)
    ]
    for answer in answers:
        change = {layer: lambda hidden: hidden + 2.0 * vector} if answer.edits else {}
        expected = generation(hf, model.tokenizer(answer.prompt).input_ids, steps, change)
        scores = expected.streams[layer][-steps:] @ (vector / vector.norm())
        assert answer.text == text(model, expected.ids)
        assert answer.score == pytest.approx(float(scores.mean()), abs=1e-3)


def autoencoder(sae_clamp: Any, width: int, features: int) -> torch.nn.Module:
    torch.manual_seed(0)
    sae = sae_clamp.SparseAutoencoder(width, features)
    with torch.no_grad():
        sae.b_dec.normal_()
    return sae


async def test_a_clamped_feature_is_what_a_hook_makes_of_it(model: VLLM, example: Any, hf: Any) -> None:
    sae_clamp = example("sae_clamp")
    sae = autoencoder(sae_clamp, hf.config.hidden_size, 4096)
    layer, feature, steps = 1, 17, 6
    ids = model.tokenizer(sae_clamp.PROMPT).input_ids
    texts = set()
    for value in (0.0, 25.0):
        before: list[float] = []

        def clamp(hidden: torch.Tensor, value: float = value, before: list[float] = before) -> torch.Tensor:
            features = torch.relu((hidden - sae.b_dec) @ sae.W_enc + sae.b_enc)
            before.append(float(features[0, -1, feature]))
            return hidden + (value - features[..., feature, None]) * sae.W_dec[feature]

        expected = generation(hf, ids, steps, {layer: clamp})
        run = await sae_clamp.clamped(model, sae, layer, feature, value, steps)
        assert run.text == text(model, expected.ids)
        assert run.before == pytest.approx(before, abs=1e-3)
        texts.add(run.text)
    assert len(texts) == 2


async def test_an_autoencoder_comes_from_a_file(model: VLLM, example: Any, hf: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    sae_clamp = example("sae_clamp")
    sae = autoencoder(sae_clamp, hf.config.hidden_size, 64)
    save_file(sae.state_dict(), tmp_path / "sae.safetensors")

    runs = await sae_clamp.main(model, str(tmp_path / "sae.safetensors"), layer=1, factors=(0.0, 2.0), max_tokens=3)

    with torch.no_grad():
        stream = generation(hf, model.tokenizer(sae_clamp.PROMPT).input_ids, 1).streams[1]
        highest = sae.encode(stream[1:]).max()
    assert [run.value for run in runs] == pytest.approx([0.0, 2.0 * float(highest)], rel=1e-3)


async def test_attention_patterns_are_those_of_eager_attention(model: VLLM, example: Any, hf: Any) -> None:
    prompt = "The cat sat on the mat. The cat sat"
    attention = await example("attention_patterns").main(model, prompt)

    hf.set_attn_implementation("eager")
    with torch.no_grad():
        expected = hf(torch.tensor([model.tokenizer(prompt).input_ids]), output_attentions=True).attentions
    torch.testing.assert_close(attention, torch.cat(expected), **CLOSE)
    torch.testing.assert_close(attention.sum(-1), torch.ones(attention.shape[:-1]))
    assert attention.triu(1).count_nonzero() == 0


def test_a_head_that_repeats_looks_at_what_came_next_last_time(example: Any) -> None:
    attention = torch.zeros(1, 2, 5, 5)
    attention[0, 0, 3, 1] = attention[0, 0, 4, 2] = 1.0  # of the tokens a b c a b: from a to b, and from b to c
    attention[0, 1, 3, 0] = attention[0, 1, 4, 2] = 1.0

    assert example("attention_patterns").repeating([7, 8, 9, 7, 8], attention).tolist() == [[1.0, 0.5]]


async def test_a_probe_is_fitted_to_the_means_of_two_kinds_of_text(model: VLLM, example: Any, hf: Any) -> None:
    stopping_probe = example("stopping_probe")
    probe = await stopping_probe.fitted(model, 2)

    for texts, wanted in ((stopping_probe.SAD, 1.0), (stopping_probe.PLAIN, -1.0)):
        means = [generation(hf, model.tokenizer(text).input_ids, 1).streams[2][1:].mean(0) for text in texts]
        assert float(torch.stack(means).mean(0) @ probe.weight + probe.bias) == pytest.approx(wanted, abs=1e-3)


async def test_a_probe_stops_at_the_first_step_above_its_limit(model: VLLM, example: Any, hf: Any) -> None:
    stopping_probe = example("stopping_probe")
    weight = torch.randn(hf.config.hidden_size, generator=torch.Generator().manual_seed(3))
    probe, steps = stopping_probe.Probe(2, weight, 0.5), 8
    chat = [{"role": "user", "content": "Write one sentence about tea."}]
    ids = model.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    plain = generation(hf, ids, steps)
    scores = (plain.streams[2][len(ids) - 1 :] @ weight + 0.5).tolist()
    limit = sorted(scores)[-3] - 1e-3
    first = next(index for index, score in enumerate(scores) if score > limit)
    assert 0 < first < steps - 1

    stopped = await stopping_probe.follow(model, "tea", probe, limit, steps)
    ended = await stopping_probe.follow(model, "tea", probe, float("inf"), steps)

    assert (stopped.stopped, ended.stopped) == (True, False)
    assert ended.scores == pytest.approx(scores, abs=1e-3)
    assert stopped.scores == pytest.approx(scores[: first + 1], abs=1e-3)
    assert stopped.text == text(model, plain.ids[: first + 1])


async def test_three_of_twenty_chats_are_stopped(model: VLLM, example: Any) -> None:
    chats = await example("stopping_probe").main(model, max_tokens=8)

    assert len(chats) == 20
    assert sum(chat.stopped for chat in chats) == 3
    assert all(len(chat.scores) == 8 for chat in chats if not chat.stopped)


def test_the_keywords_of_an_example_are_its_options(example: Any) -> None:
    launch = example("launch")

    async def scaled(
        model: Any, prompt: str = "Hello", factors: tuple[float, ...] = (1.0,), max_tokens: int = 3
    ) -> None:
        pass

    given = launch.parser(scaled, None).parse_args(["--factors", "2", "-3.5", "--max-tokens", "7"])

    assert vars(given) == {
        "model": None, "dtype": "float32", "prompt": "Hello", "factors": [2.0, -3.5], "max_tokens": 7
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("script", [path.name for path in EXAMPLES.glob("*.py") if path.name != "launch.py"])
def test_an_example_runs_from_the_command_line(script: str, llama: str) -> None:
    command = [
        sys.executable,
        str(EXAMPLES / script),
        "--model",
        tiny_vision_checkpoint() if script in SEEING else llama,
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    assert len(ended.stdout.splitlines()) > 3
