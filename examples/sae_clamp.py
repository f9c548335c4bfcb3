"""A feature of a sparse autoencoder, held at a value in every step of a generation.

The autoencoder is an ordinary module of yours. It runs inside the block: the stream is encoded, one feature is set, and
what is decoded goes back with the part that the autoencoder cannot express added again. Its weights are sent to the
engine with the first run that uses them, and recognised by their content after that.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import torch
from launch import launch
from safetensors.torch import load_file
from torch import nn

PROMPT = "Once upon a time there was a"


class SparseAutoencoder(nn.Module):
    """A ReLU autoencoder, with the names that SAELens gives to its weights."""

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.W_enc = nn.Parameter(torch.randn(width, features) / width**0.5)
        self.b_enc = nn.Parameter(torch.zeros(features))
        self.W_dec = nn.Parameter(self.W_enc.detach().T.contiguous())
        self.b_dec = nn.Parameter(torch.zeros(width))

    def encode(self, stream: torch.Tensor) -> torch.Tensor:
        return torch.relu((stream - self.b_dec) @ self.W_enc + self.b_enc)

    def decode(self, features: torch.Tensor) -> torch.Tensor:
        return features @ self.W_dec + self.b_dec


def load_sae(path: str) -> SparseAutoencoder:
    """The autoencoder in a safetensors file."""
    weights = load_file(path)
    sae = SparseAutoencoder(*weights["W_enc"].shape)
    sae.load_state_dict(weights)
    return sae


@dataclass
class Clamped:
    """What the feature was in each step before it was set, and the text that came of setting it."""

    value: float
    before: list[float]
    text: str


async def clamped(
    model: Any, sae: SparseAutoencoder, layer: int, feature: int, value: float, max_tokens: int
) -> Clamped:
    """Go on with the prompt while `feature` of the stream after `layer` is `value` at every position."""
    async with model.trace(PROMPT, max_tokens=max_tokens, temperature=0.0, ignore_eos=True) as tracer:
        for _ in tracer.iter[:]:
            stream = model.model.layers[layer].resid_post
            features = sae.encode(stream.float())
            error = stream - sae.decode(features)
            before = features[-1, feature].item().save()
            features[:, feature] = value
            model.model.layers[layer].resid_post = sae.decode(features) + error
    strengths = [strength async for strength in before.stream()]
    return Clamped(value, strengths, (await tracer.result).outputs[0].text)


async def strongest(model: Any, sae: SparseAutoencoder, layer: int) -> tuple[int, float]:
    """The feature that is highest anywhere in the prompt but at its first token, and its value there."""
    async with model.trace(PROMPT, max_tokens=1):
        highest = sae.encode(model.model.layers[layer].resid_post[1:].float()).amax(0).save()
    value, feature = (await highest).max(0)
    return int(feature), float(value)


async def main(
    model: Any,
    weights: str = "",
    layer: int = -1,
    factors: tuple[float, ...] = (0.0, 1.0, 2.0, 4.0),
    max_tokens: int = 16,
) -> list[Clamped]:
    """Prints and returns what comes of setting one feature to `factors` times the highest value it has in the prompt.

    `weights` is a safetensors file; without one the weights are random, which makes no sense but runs.
    """
    layer = len(model.model.layers) // 2 if layer < 0 else layer
    width = model.vllm_entrypoint.model_config.get_hidden_size()
    sae = load_sae(weights) if weights else SparseAutoencoder(width, 16 * width)
    feature, value = await strongest(model, sae, layer)
    runs = await asyncio.gather(*(clamped(model, sae, layer, feature, each * value, max_tokens) for each in factors))
    print(f"\nfeature {feature} after layer {layer}  {PROMPT} ...")
    for run in runs:
        print(f"{run.value:>8.2f}  {run.text!r}")
    return runs


if __name__ == "__main__":
    launch(main, __doc__)
