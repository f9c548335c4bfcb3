"""Where each head looks: attention patterns from the queries and keys of one run.

vLLM's kernels never write the patterns down. Queries and keys are read as the attention gets them, after the rotary
embedding, and each key is shared by a group of heads where the model has fewer keys than queries.
"""

from __future__ import annotations

from typing import Any

import torch
from launch import launch

PROMPT = "The cat sat on the mat. The cat sat on the"


async def patterns(model: Any, prompt: str) -> torch.Tensor:
    """`[layers, heads, tokens, tokens]`: row i of a head says how much token i takes from each token up to it."""
    async with model.trace(prompt, max_tokens=1):
        layers = []
        for layer in model.model.layers:
            heads = layer.self_attn.heads
            queries, keys = heads.q.float(), heads.k.float()  # [tokens, heads, size], and fewer heads of keys
            keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
            scores = torch.einsum("qhd,khd->hqk", queries, keys) * layer.self_attn.scaling
            later = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
            layers.append(scores.masked_fill(later, float("-inf")).softmax(-1))
        attention = torch.stack(layers).save()
    return await attention


def repeating(ids: list[int], attention: torch.Tensor) -> torch.Tensor:
    """`[layers, heads]`: how much goes to what came after the same token before, as in an induction head."""
    scores = torch.zeros(attention.shape[:2])
    pairs = [(at, past + 1) for at, token in enumerate(ids) for past in range(at - 1) if ids[past] == token]
    for at, target in pairs:
        scores += attention[:, :, at, target] / len(pairs)
    return scores


async def main(model: Any, prompt: str = PROMPT, top: int = 5) -> torch.Tensor:
    """Prints the heads that do most of some well-known things, and one pattern; returns all patterns."""
    attention = await patterns(model, prompt)
    ids = model.tokenizer(prompt).input_ids
    print()
    for name, scores in (
        ("the token before", attention.diagonal(-1, -2, -1).mean(-1)),
        ("the first token", attention[..., 1:, 0].mean(-1)),
        ("what came next last time", repeating(ids, attention)),
    ):
        best = scores.flatten().topk(top)
        places = (divmod(index, scores.shape[1]) for index in best.indices.tolist())
        found = (f"{layer}.{head} {value:.2f}" for (layer, head), value in zip(places, best.values, strict=True))
        print(f"{name:<25}" + "   ".join(found))
    layer, head = divmod(int(repeating(ids, attention).argmax()), attention.shape[1])
    print(f"\nlayer {layer}, head {head}")
    show(attention[layer, head], [model.tokenizer.decode([token]) for token in ids])
    return attention


def show(pattern: torch.Tensor, words: list[str]) -> None:
    for word, row in zip(words, pattern.tolist(), strict=True):
        print(f"{word!r:>14} " + "".join(" ░▒▓█"[round(4 * value)] * 2 for value in row))


if __name__ == "__main__":
    launch(main, __doc__)
