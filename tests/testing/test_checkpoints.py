from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoTokenizer

from nnsight_async.testing import (
    CHECKPOINTS,
    hf_model,
    quiet_environment,
    tiny_checkpoint,
    v2_runner_environment,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPTS = ["The capital of France is", "Hello", "def f(x):\n    return"]
TEXT = "The capital of France is — ça va? 日本\n\x00"


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_any_text_survives_the_tokenizer(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint(name))

    assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT
    assert len(tokenizer) == hf_model(name).config.vocab_size
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


def test_the_chat_template_ends_with_the_turn_to_answer(llama: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llama)

    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )

    assert text == "<|turn|>user\nHi<|end|>\n<|turn|>assistant\n"


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_greedy_choices_are_clear_and_never_special(name: str) -> None:
    model = hf_model(name)

    for prompt in encode(name):
        logits = logits_along(model, [*prompt, *greedy(model, prompt)])[len(prompt) - 1 :]
        best, second = logits.topk(2).values.unbind(-1)
        assert (best - second).min() > 1e-3
        assert logits.argmax(-1).min() >= 4


def test_a_seed_draws_its_own_weights() -> None:
    first, second = hf_model("llama", seed=0), hf_model("llama", seed=1)

    assert not torch.equal(first.lm_head.weight, second.lm_head.weight)


@pytest.mark.slow
def test_many_processes_may_make_one_checkpoint_at_once(tmp_path: Path) -> None:
    script = "from nnsight_async.testing import tiny_checkpoint; print(tiny_checkpoint('llama'))"
    environment = {**os.environ, "NNSIGHT_ASYNC_CACHE": str(tmp_path)}

    def make(_: int) -> str:
        command = [sys.executable, "-c", script]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()

    with ThreadPoolExecutor(3) as pool:
        folders = set(pool.map(make, range(3)))

    (folder,) = folders
    assert list(Path(folder).parent.iterdir()) == [Path(folder)]


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in CHECKPOINTS if name != "llama")]
)
def test_plain_vllm_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    answer = plain_vllm(name, tmp_path, {})

    assert answer["runner"] == "vllm.v1.worker.cpu_model_runner"
    assert answer["tokens"] == [greedy(hf_model(name), prompt) for prompt in encode(name)]


@pytest.mark.slow
def test_the_v2_runner_agrees_with_transformers(tmp_path: Path) -> None:
    answer = plain_vllm("llama", tmp_path, v2_runner_environment())

    assert answer["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert answer["tokens"] == [greedy(hf_model("llama"), prompt) for prompt in encode("llama")]


def encode(name: str) -> list[list[int]]:
    return AutoTokenizer.from_pretrained(tiny_checkpoint(name))(PROMPTS).input_ids


def logits_along(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(16):
        tokens.append(int(logits_along(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def plain_vllm(name: str, folder: Path, extra: dict[str, str]) -> dict:
    answer = folder / "answer.json"
    command = [
        sys.executable,
        str(Path(__file__).with_name("plain_vllm.py")),
        tiny_checkpoint(name),
        json.dumps(encode(name)),
        str(answer),
    ]
    environment = {**os.environ, **quiet_environment(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **extra}
    subprocess.run(command, env=environment, check=True, timeout=500)
    return json.loads(answer.read_text())
