"""Models to measure: tiny checkpoints with weights, shapes of real models without, or a path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nnsight_async.folders import cache_folder, publish
from nnsight_async.testing.checkpoints import CHECKPOINTS, tiny_checkpoint

VOCABULARY = 151936
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": VOCABULARY - 2,
    "eos_token_id": VOCABULARY - 2,
    "pad_token_id": VOCABULARY - 1,
}
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "rope_theta": 1e5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    },
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "qwen3-1.7b": {
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 6144,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 12288,
        "tie_word_embeddings": False,
    },
}
NAMES = [*CHECKPOINTS, *SHAPES]


def engine_arguments(model: str) -> dict[str, Any]:
    """`model` and, for a shape, `load_format`, as arguments for the engine."""
    if model in CHECKPOINTS:
        return {"model": tiny_checkpoint(model)}
    if model in SHAPES:
        folder = publish(cache_folder("benchmarks", model), lambda draft: _write(draft, SHAPES[model]))
        return {"model": str(folder), "load_format": "dummy"}
    return {"model": model}


def _write(folder: Path, shape: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps({**QWEN3, **shape}))
    _tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _tokenizer() -> Any:
    """A word for every id, so that drawn tokens are detokenised at about the cost of real ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"\u0120w{number}" for number in range(len(alphabet), VOCABULARY - 2)]
    vocabulary = {word: number for number, word in enumerate([*alphabet, *words, "<eos>", "<pad>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
