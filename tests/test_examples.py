"""The examples, on a tiny model of random weights: what is checked holds for any model."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from nnsight_async import VLLM

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


async def test_the_lens_of_the_last_layer_is_what_the_model_says(model: VLLM, example: Any) -> None:
    rows = await example("stream_logit_lens").main(model, max_tokens=6)

    assert len(rows) == 6
    assert [lens[-1] for _, lens in rows] == [token for token, _ in rows]
    assert any(lens[0] != token for token, lens in rows)


async def test_steering_changes_the_text_and_no_steering_does_not(model: VLLM, example: Any) -> None:
    steering = example("steering")

    texts = await steering.main(model, (-2.0, 0.0, 2.0), max_tokens=8)

    plain = await model.generate(steering.PROMPT, max_tokens=8, temperature=0.0)
    assert texts[0.0] == plain[0].outputs[0].text
    assert len(set(texts.values())) == 3


async def test_patching_restores_everything_at_the_last_layer_and_place(model: VLLM, example: Any) -> None:
    grid = await example("activation_patching").main(model, "The boat was red", "The boat was bed")

    same = len(model.tokenizer("The boat was ").input_ids) - 1
    torch.testing.assert_close(grid[-1, -1].item(), 1.0, rtol=0.0, atol=1e-3)
    torch.testing.assert_close(grid[:, :same], torch.zeros_like(grid[:, :same]), rtol=0.0, atol=1e-3)
    torch.testing.assert_close(grid[-1, :-1], torch.zeros_like(grid[-1, :-1]), rtol=0.0, atol=1e-3)


async def test_one_of_twenty_chats_is_stopped_and_nothing_of_it_stays(model: VLLM, example: Any) -> None:
    chats = await example("concurrent_probes").main(model, max_tokens=8)

    assert len(chats) == 20
    assert sum(chat.stopped for chat in chats) == 1
    assert all(len(chat.scores) == 8 for chat in chats if not chat.stopped)
    assert all(-1.001 <= score <= 1.001 for chat in chats for score in chat.scores)


@pytest.mark.slow
@pytest.mark.parametrize("script", [path.name for path in EXAMPLES.glob("*.py") if path.name != "launch.py"])
def test_an_example_runs_from_the_command_line(script: str, llama: str) -> None:
    command = [sys.executable, str(EXAMPLES / script), "--model", llama]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    assert len(ended.stdout.splitlines()) > 3
