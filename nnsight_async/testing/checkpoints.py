"""Checkpoints of real architectures, small enough to make on the spot (about 1 MB, under a second)."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnsight_async.folders import cache_folder, publish
from nnsight_async.testing.tokenizer import SPECIAL, VOCABULARY, byte_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

ROTARY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}

# Sizes divide by two everywhere (tensor parallel), and head sizes are among those that vLLM's CPU attention takes.
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama": {**ROTARY, "hidden_size": 128, "intermediate_size": 256},
    "qwen3": {**ROTARY, "hidden_size": 64, "intermediate_size": 192},
    "gpt2": {"vocab_size": VOCABULARY, "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 512},
    "qwen3_moe": {
        **ROTARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
}

FINAL_NORMS = ("model.norm.weight", "transformer.ln_f.weight")
GAIN = 4.0  # about the standard deviation of the logits, so that the best of 512 leads the second clearly


def tiny_checkpoint(name: str, *, seed: int = 0) -> str:
    """The folder of a float32 checkpoint `name` (a key of `CHECKPOINTS`) with random weights drawn from `seed`.

    It is made at the first call and kept in the cache folder. Raises `KeyError` for an unknown name.
    """
    sizes = CHECKPOINTS[name]
    folder = cache_folder("testing", f"{name}-{seed}-{version_of(__file__)}")
    return str(publish(folder, lambda draft: _write(draft, name, sizes, seed)))


def hf_model(name: str, *, seed: int = 0) -> PreTrainedModel:
    """The same checkpoint as a transformers model in float32 and evaluation mode, to be a test's oracle."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_checkpoint(name, seed=seed), dtype=torch.float32).eval()


def version_of(file: str) -> str:
    """What a checkpoint that `file` makes depends on: its text, that of the tokenizer, and transformers."""
    import transformers

    sources = [Path(file), Path(__file__).with_name("tokenizer.py")]
    content = b"".join(source.read_bytes() for source in sources) + transformers.__version__.encode()
    return hashlib.sha256(content).hexdigest()[:12]


def _write(folder: Path, name: str, sizes: dict[str, Any], seed: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = byte_tokenizer()
    tokens = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    config: PreTrainedConfig = AutoConfig.for_model(name, **sizes, **tokens, dtype="float32")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _draw(model, torch.Generator().manual_seed(seed))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _draw(model: PreTrainedModel, generator: torch.Generator) -> None:
    import torch

    width = model.config.hidden_size
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.0 / math.sqrt(width), generator=generator)
            elif path.endswith("bias"):
                parameter.normal_(0.0, 0.1, generator=generator)
            else:  # a norm: not all ones, or a forgotten norm weight would go unnoticed
                parameter.uniform_(0.5, 1.5, generator=generator)
            if path.endswith(FINAL_NORMS):
                parameter.mul_(GAIN)
        # Special tokens are never the likeliest: no generation ends by itself.
        model.get_parameter("lm_head.weight")[: len(SPECIAL)] = 0.0
