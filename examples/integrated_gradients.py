"""How much each token of a prompt contributes to an answer: gradients, summed on the way from no prompt to the prompt.

"No prompt" is the mean of all embeddings, at every position. The contributions add up to the difference that the prompt
makes, which shows whether there were enough steps.
"""

from __future__ import annotations

from typing import Any

import torch
from launch import launch_local

PROMPT = "The capital of France is"


def main(model: Any, prompt: str = PROMPT, steps: int = 64) -> tuple[torch.Tensor, float]:
    """The contribution of each token to the logit of the answer, and the difference that they should add up to."""
    with model.trace(prompt):
        neutral = model.model.embed_tokens.weight.mean(0).save()
        whole = model.model.embed_tokens.output.save()
        answer = model.logits.argmax(-1).save()

    logits, total = [], torch.zeros_like(whole)
    for scale in [0.0, *((step + 0.5) / steps for step in range(steps)), 1.0]:
        with model.trace(prompt):
            embedded = model.model.embed_tokens.output
            embedded[:] = neutral + scale * (embedded - neutral)
            target = model.logits[0, answer].sum()
            target.backward()
            logit = target.detach().save()
            gradient = embedded.grad.save()
        logits.append(float(logit))
        if 0 < scale < 1:
            total += gradient / steps
    contributions = ((whole - neutral) * total).sum(-1)

    for token, value in zip(model.tokenizer(prompt).input_ids, contributions.tolist(), strict=True):
        print(f"{model.tokenizer.decode([token])!r:>12} {value:+.3f}")
    difference = logits[-1] - logits[0]
    print(f"{'in all':>12} {float(contributions.sum()):+.3f} of {difference:+.3f}")
    return contributions, difference


if __name__ == "__main__":
    launch_local(main, __doc__)
