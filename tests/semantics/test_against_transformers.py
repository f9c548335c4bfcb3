"""What a block reads, and what its edits do, on four architectures, against transformers in float32."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from nnsight_async import save

PROMPT = [5, 17, 101, 9, 33, 250, 77]
STEPS = 5
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@torch.no_grad()
def greedy(hf: Any, prompt: list[int], steps: int) -> tuple[list[int], list[torch.Tensor]]:
    """Ids and logits of greedy generation, by full forward passes."""
    ids, logits = list(prompt), []
    for _ in range(steps):
        logits.append(hf(torch.tensor([ids])).logits[0, -1])
        ids.append(int(logits[-1].argmax()))
    return ids[len(prompt) :], logits


@contextmanager
def hooked(*hooks: tuple[torch.nn.Module, Any]):
    """Forward hooks on modules of the oracle; each gets the output and returns its replacement."""
    with ExitStack() as stack:
        for module, edit in hooks:
            handle = module.register_forward_hook(lambda _, args, output, edit=edit: edit(output))
            stack.callback(handle.remove)
        yield


def edited(output: Any, edit: Any) -> Any:
    """`edit` applied to the hidden states in a module's output, which may be the first of a tuple."""
    return (edit(output[0]), *output[1:]) if isinstance(output, tuple) else edit(output)


def generated(tracer: Any) -> list[int]:
    return list(tracer.result.outputs[0].token_ids)


def test_residual_stream_logits_and_ids_of_every_step(pair):
    layers, stream = pair.layers, pair.stream
    with pair.model.trace(PROMPT, max_tokens=STEPS, temperature=0.0, ignore_eos=True) as tracer:
        streams, logits, samples = save([]), save([]), save([])
        for _ in tracer.iter[:]:
            streams.append([stream(layer.output) for layer in layers])
            logits.append(pair.model.logits)
            samples.append(pair.model.samples)

    ids, expected_logits = greedy(pair.hf, PROMPT, STEPS)
    assert generated(tracer) == ids
    assert [int(sample) for sample in samples] == ids
    for got, expected in zip(logits, expected_logits, strict=True):
        assert got.shape == (1, expected.shape[0])
        torch.testing.assert_close(got[0], expected, **CLOSE)

    seen: dict[int, torch.Tensor] = {}

    def keep(number: int) -> Any:
        return lambda output: seen.update({number: output[0] if isinstance(output, tuple) else output})

    with hooked(*((layer, keep(number)) for number, layer in enumerate(pair.hf_layers))), torch.no_grad():
        pair.hf(torch.tensor([PROMPT + ids[:-1]]))
    for number in range(len(pair.hf_layers)):
        got = torch.cat([step[number] for step in streams])
        torch.testing.assert_close(got, seen[number][0], **CLOSE)
    assert [step[0].shape[0] for step in streams] == [len(PROMPT)] + [1] * (STEPS - 1)


def test_zeroing_an_mlp_by_replacement(pair):
    layers = pair.layers
    with pair.model.trace(PROMPT, max_tokens=STEPS, temperature=0.0, ignore_eos=True) as tracer:
        logits = save([])
        for _ in tracer.iter[:]:
            mlp = layers[1].mlp.output
            layers[1].mlp.output = torch.zeros_like(mlp)
            logits.append(pair.model.logits)
    with hooked((pair.hf_layers[1].mlp, lambda output: edited(output, torch.zeros_like))):
        ids, expected = greedy(pair.hf, PROMPT, STEPS)
    assert generated(tracer) == ids
    torch.testing.assert_close(torch.cat(logits), torch.stack(expected), **CLOSE)


def test_zeroing_an_mlp_in_place(pair):
    layers = pair.layers
    with pair.model.trace(PROMPT, max_tokens=STEPS, temperature=0.0, ignore_eos=True) as tracer:
        logits = save([])
        for _ in tracer.iter[:]:
            layers[1].mlp.output[:] = 0
            logits.append(pair.model.logits)
    with hooked((pair.hf_layers[1].mlp, lambda output: edited(output, torch.zeros_like))):
        ids, expected = greedy(pair.hf, PROMPT, STEPS)
    assert generated(tracer) == ids
    torch.testing.assert_close(torch.cat(logits), torch.stack(expected), **CLOSE)


def test_adding_a_vector_to_the_residual_stream(pair):
    layers = pair.layers
    width = pair.hf.config.hidden_size
    vector = torch.randn(width, generator=torch.Generator().manual_seed(1)) * 3
    with pair.model.trace(PROMPT, max_tokens=STEPS, temperature=0.0, ignore_eos=True) as tracer:
        logits = save([])
        for _ in tracer.iter[:]:
            output = layers[0].output
            hidden = output if isinstance(output, torch.Tensor) else output[0]
            hidden += vector
            logits.append(pair.model.logits)
    with hooked((pair.hf_layers[0], lambda output: edited(output, lambda hidden: hidden + vector))):
        ids, expected = greedy(pair.hf, PROMPT, STEPS)
    assert generated(tracer) == ids
    assert ids != greedy(pair.hf, PROMPT, STEPS)[0]
    torch.testing.assert_close(torch.cat(logits), torch.stack(expected), **CLOSE)


def test_patching_a_row_from_another_run(pair):
    layers, stream = pair.layers, pair.stream
    other = [7, 8, 9, 10, 11, 12, 13]
    with pair.model.trace(other, max_tokens=1) as tracer:
        source = stream(layers[1].output).save()
    with pair.model.trace(PROMPT, max_tokens=1, temperature=0.0) as tracer:
        output = layers[1].output
        if isinstance(output, torch.Tensor):
            output[3] = source[3]
        else:
            output[0][3], output[1][3] = source[3], 0
        logits = pair.model.logits.save()

    captured: dict[str, torch.Tensor] = {}

    def capture(output: Any) -> None:
        captured["stream"] = output[0] if isinstance(output, tuple) else output

    def patch(hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.clone()
        hidden[0, 3] = captured["stream"][0, 3]
        return hidden

    with torch.no_grad():
        with hooked((pair.hf_layers[1], capture)):
            pair.hf(torch.tensor([other]))
        with hooked((pair.hf_layers[1], lambda output: edited(output, patch))):
            expected = pair.hf(torch.tensor([PROMPT])).logits[0, -1]
    torch.testing.assert_close(source, captured["stream"][0], **CLOSE)
    torch.testing.assert_close(logits[0], expected, **CLOSE)


def test_a_forced_token_is_what_generation_goes_on_from(pair):
    with pair.model.trace(PROMPT, max_tokens=STEPS, temperature=0.0, ignore_eos=True) as tracer:
        for step in tracer.iter[:]:
            if step == 1:
                pair.model.samples[:] = 42
    ids = generated(tracer)
    assert ids[1] == 42
    first, _ = greedy(pair.hf, PROMPT, 1)
    rest, _ = greedy(pair.hf, [*PROMPT, *first, 42], STEPS - 2)
    assert ids == [*first, 42, *rest]


def test_edited_logits_decide_the_token(pair):
    with pair.model.trace(PROMPT, max_tokens=3, temperature=0.0, ignore_eos=True) as tracer:
        for step in tracer.iter[:]:
            pair.model.logits[:, 100 + step] = 1e6
    assert generated(tracer) == [100, 101, 102]


def test_an_input_is_read_and_edited(pair):
    layers = pair.layers
    with pair.model.trace(PROMPT, max_tokens=1, temperature=0.0) as tracer:
        given = layers[1].mlp.input.save()
        layers[1].mlp.input = torch.zeros_like(given)
        logits = pair.model.logits.save()
    seen: dict[str, torch.Tensor] = {}

    def zero(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        seen["input"] = args[0]
        return (torch.zeros_like(args[0]), *args[1:])

    handle = pair.hf_layers[1].mlp.register_forward_pre_hook(zero)
    with torch.no_grad():
        expected = pair.hf(torch.tensor([PROMPT])).logits[0, -1]
    handle.remove()
    torch.testing.assert_close(given, seen["input"].reshape(given.shape), **CLOSE)
    torch.testing.assert_close(logits[0], expected, **CLOSE)
