"""Which parts of an image an answer depends on, patch by patch, from one forward and one backward pass.

What a patch adds to the logit of the answer is estimated as its features, as the language model gets them, times their
gradient. Then the patch that adds most is put out of sight, to see what becomes of the logit.
"""

from __future__ import annotations

from typing import Any

import torch
from launch import launch_local

QUESTION = "What is in the picture?"
SHADES = " .:-=+*#%@"


def main(model: Any, image: str = "", question: str = QUESTION) -> tuple[torch.Tensor, float, float]:
    """The effect of each patch, `[rows, columns]`, and the logit of the answer with and without the largest of them."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(model.repo)
    text = f"USER: {processor.image_token}\n{question} ASSISTANT:"
    prompt = processor(images=picture(image), text=text, return_tensors="pt")

    with model.trace(prompt):
        features = model.model.multi_modal_projector.output
        answer = model.logits.argmax(-1).save()
        logit = model.logits.max()
        logit.backward()
        seen = logit.detach().save()
        effects = (features * features.grad).sum(-1).flatten().detach().save()

    largest = int(effects.argmax())
    with model.trace(prompt):
        features = model.model.multi_modal_projector.output
        features.flatten(0, -2)[largest] = 0
        hidden = model.logits[0, answer].sum().save()

    grid = effects.reshape(round(len(effects) ** 0.5), -1)
    for row in shades(grid):
        print("".join(row))
    where, left = divmod(largest, grid.shape[1]), float(seen - effects.max())
    print(f"answer {processor.decode(answer)!r}: its logit is {float(seen):+.3f}")
    print(f"without patch {where} it is {float(hidden):+.3f}, estimated {left:+.3f}")
    return grid, float(seen), float(hidden)


def picture(path: str) -> Any:
    """The image at `path`; a red disc on blue ground, if there is none."""
    from PIL import Image, ImageDraw

    if path:
        return Image.open(path).convert("RGB")
    drawn = Image.new("RGB", (336, 336), "blue")
    ImageDraw.Draw(drawn).ellipse((40, 80, 160, 200), fill="red")
    return drawn


def shades(grid: torch.Tensor) -> list[list[str]]:
    """Two characters for each patch, the darker the more it adds."""
    scaled = (grid - grid.min()) / (grid.max() - grid.min()).clamp(min=1e-12) * (len(SHADES) - 1)
    return [[SHADES[round(value)] * 2 for value in row] for row in scaled.tolist()]


def tiny() -> str:
    from nnsight_async.testing.vision import tiny_vision_checkpoint

    print("random weights, because no --model was given")
    return tiny_vision_checkpoint()


if __name__ == "__main__":
    launch_local(main, __doc__, tiny)
