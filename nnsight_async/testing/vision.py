"""A tiny checkpoint of a model that sees, with its processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nnsight_async.folders import cache_folder, publish
from nnsight_async.testing.checkpoints import version_of
from nnsight_async.testing.tokenizer import VOCABULARY, byte_tokenizer

IMAGE = "<image>"
SIDE, PATCH = 56, 14
"""Pixels of an image after the processor, and of a patch, each way."""

TEXT: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY + 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}
VISION: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
    "initializer_range": 0.1,
}


def tiny_vision_checkpoint(*, seed: int = 0) -> str:
    """The folder of a float32 LLaVA with random weights drawn from `seed`, made at the first call and kept."""
    folder = cache_folder("testing", f"llava-{seed}-{version_of(__file__)}")
    return str(publish(folder, lambda draft: _write(draft, seed)))


def _write(folder: Path, seed: int) -> None:
    import torch
    from transformers import CLIPImageProcessorPil, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([IMAGE], special_tokens=True)
    sized = {"height": SIDE, "width": SIDE}
    images = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=sized)
    processor = LlavaProcessor(
        images, tokenizer, patch_size=PATCH, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    config = LlavaConfig(text_config=TEXT, vision_config=VISION, image_token_index=processor.image_token_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlavaForConditionalGeneration(config)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
