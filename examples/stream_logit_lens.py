"""Beside each token of an answer, what the model would have said had it stopped after each of some layers."""

from __future__ import annotations

from typing import Any

from launch import launch

QUESTION = "What is the capital of France?"


async def main(model: Any, question: str = QUESTION, max_tokens: int = 12) -> list[tuple[int, list[int]]]:
    """Prints a row a token; returns each token with the guesses of the layers, the last of which is the token."""
    layers = list(model.model.layers)
    shown = [number for number in range(len(layers)) if number % max(1, len(layers) // 4) == 0]
    shown = sorted({*shown, len(layers) - 1})
    chat = [{"role": "user", "content": question}]

    async with model.trace(chat, max_tokens=max_tokens, temperature=0.0) as tracer:
        for _ in tracer.iter[:]:
            streams = []
            for number in shown:
                hidden, residual = layers[number].output
                streams.append((hidden + residual)[-1:])
            guesses = [model.logits_processor(model.lm_head, model.model.norm(stream)).argmax() for stream in streams]
            lens = [int(guess) for guess in guesses]
            tracer.save(lens, "lens")

    print(f"\n{'token':<14}" + "".join(f"{f'layer {number}':<14}" for number in shown))
    rows = []
    async for token in tracer.stream():
        words = [model.tokenizer.decode([guess]) for guess in token.saves["lens"]]
        print(f"{token.text!r:<14}" + "".join(f"{word!r:<14}" for word in words))
        rows.append((token.id, token.saves["lens"]))
    return rows


if __name__ == "__main__":
    launch(main, __doc__)
