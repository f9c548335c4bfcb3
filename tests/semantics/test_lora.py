"""LoRA adapters: mixed in a batch, part of what is read, and harmless where they are broken."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from nnsight_async import VLLM, AdapterError
from nnsight_async.testing.engine import drained
from nnsight_async.testing.oracle import generation
from tests.conftest import LONG, engine_args_for_long
from tests.semantics.conftest import build

pytestmark = pytest.mark.backends("vllm")

PROMPT = [5, 17, 101, 9, 33, 250, 77]
STEPS = 4
GREEDY = {"max_tokens": STEPS, "temperature": 0.0, "ignore_eos": True}
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
RANK, ALPHA = 4, 8
BLOCK = 32
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def adapted() -> Iterator[VLLM]:
    args = {**engine_args_for_long(), "enable_prefix_caching": True, "block_size": BLOCK}
    model = build("llama", enable_lora=True, max_lora_rank=RANK * 2, max_loras=3, **args)
    yield model
    model.close()


def write(hf: Any, folder: Path, seed: int, rank: int = RANK) -> str:
    """An adapter of random weights for every linear layer of the model."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, module in hf.named_modules():
        if name.endswith(ADAPTED):
            rows, columns = module.weight.shape
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) / 12
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) / 12
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "target_modules": list(ADAPTED), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM"}))
    return str(folder)


def merged(hf: Any, folder: str) -> Any:
    """The model with the product of an adapter's matrices added to its weights."""
    model, tensors = deepcopy(hf), load_file(Path(folder) / "adapter_model.safetensors")
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.endswith(ADAPTED):
                key = f"base_model.model.{name}.lora_"
                module.weight += ALPHA / RANK * tensors[f"{key}B.weight"] @ tensors[f"{key}A.weight"]
    return model


@pytest.fixture(scope="module")
def adapters(hf: Any, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    folder = tmp_path_factory.mktemp("adapters")
    return [LoRARequest(name, number, write(hf, folder / name, number)) for number, name in enumerate("abc", 1)]


@pytest.fixture(scope="module")
def merges(hf: Any, adapters: list[LoRARequest]) -> dict[int, Any]:
    """The models, by the number of the adapter that is merged into them; 0 is the base model."""
    return {0: hf, **{adapter.lora_int_id: merged(hf, adapter.lora_path) for adapter in adapters}}


def same(tensor: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(tensor, wanted, **CLOSE)


async def test_what_is_read_and_drawn_is_that_of_merged_weights(adapted, adapters, merges):
    for lora in (None, *adapters):
        number = 0 if lora is None else lora.lora_int_id
        async with adapted.trace(PROMPT, lora_request=lora, **GREEDY) as tracer:
            for _ in tracer.iter[:]:
                stream = adapted.model.layers[2].resid_post.save()
                logits = adapted.logits.save()
        wanted = generation(merges[number], PROMPT, STEPS)
        tokens = [token async for token in tracer.stream()]
        assert [token.id for token in tokens] == wanted.ids
        same(torch.cat([token.saves["stream"] for token in tokens]), wanted.streams[2])
        same(torch.cat([token.saves["logits"] for token in tokens]), wanted.logits)
        assert await stream is not await logits


async def test_the_output_of_a_wrapped_layer_has_the_adapter_in_it(adapted, adapters, merges):
    async with adapted.trace(PROMPT, max_tokens=1, lora_request=adapters[0]):
        attention = adapted.model.layers[0].self_attn
        given = attention.qkv_proj.input.save()
        projected = attention.qkv_proj.output[0].save()
        gated = adapted.model.layers[0].mlp.gate_up_proj.output[0].save()
        lowered = adapted.model.layers[0].mlp.down_proj.output[0].save()
    layer = merges[1].model.layers[0]
    parts = [getattr(layer.self_attn, name).weight for name in ("q_proj", "k_proj", "v_proj")]
    same(await projected, await given @ torch.cat(parts).T)
    gate, up = (await gated).chunk(2, -1)
    same(await lowered, (torch.nn.functional.silu(gate) * up) @ layer.mlp.down_proj.weight.T)


async def test_an_adapter_in_use_needs_its_files_no_more(hf, merges, tmp_path):
    """There is room for one, so that another that is loaded ahead takes its place; its request goes on with it."""
    folder = write(hf, tmp_path / "first", 1)
    first, second = LoRARequest("first", 1, folder), LoRARequest("second", 2, write(hf, tmp_path / "second", 2))
    model = build("llama", enable_lora=True, max_lora_rank=RANK * 2, max_loras=1)
    try:
        async with model.run(
            PROMPT, lambda model, tracer: None, lora_request=first, **{**GREEDY, "max_tokens": 60}
        ) as run:
            ids = []
            async for token in run.stream():
                ids.append(token.id)
                if token.index == 1:
                    shutil.rmtree(folder)
                    await model.add_lora(second)
        assert ids == generation(merges[1], PROMPT, 60).ids
        (output,) = await model.generate(PROMPT, lora_request=second, **GREEDY)
        assert list(output.outputs[0].token_ids) == generation(merges[2], PROMPT, STEPS).ids
        with pytest.raises(AdapterError, match="first"):
            await model.generate(PROMPT, lora_request=first, max_tokens=1)
        await drained(model)
    finally:
        await model.aclose()


async def test_edits_and_heads_and_the_logit_lens_on_adapted_layers(adapted, adapters, merges):
    async with adapted.trace(PROMPT, max_tokens=1, lora_request=adapters[1]):
        adapted.model.layers[1].self_attn.o_proj.output[0][:] = 0
        stream = adapted.model.layers[1].resid_mid.save()
        late = adapted.model.layers[3].resid_post[-1:]
        lens = adapted.logits_processor(adapted.lm_head, adapted.model.norm(late)).save()
        logits = adapted.logits.save()
    same(await lens, await logits)
    first = generation(merges[2], PROMPT, 1).streams[0]
    same(await stream, first)


async def test_adapters_are_mixed_in_a_batch(adapted, adapters, merges):
    wanted = {number: generation(model, PROMPT, STEPS) for number, model in merges.items()}

    async def one(number: int) -> None:
        lora = adapters[number - 1] if number else None
        async with adapted.trace(PROMPT, lora_request=lora, **GREEDY) as tracer:
            for _ in tracer.iter[:]:
                row = adapted.model.layers[3].resid_post[-1].save()
        found = [token async for token in tracer.stream()]
        assert [token.id for token in found] == wanted[number].ids
        same(torch.stack([token.saves["row"] for token in found]), wanted[number].streams[3][len(PROMPT) - 1 :])
        await row

    await asyncio.gather(*(one(number % 4) for number in range(16)))
    await drained(adapted)


async def test_an_invoke_has_an_adapter_of_its_own(adapted, adapters, merges):
    async with adapted.trace(lora_request=adapters[0], **GREEDY) as tracer:
        with tracer.invoke(PROMPT):
            first = adapted.logits.save()
        with tracer.invoke(PROMPT, lora_request=adapters[1]):
            second = adapted.logits.save()
        with tracer.invoke(PROMPT, lora_request=None):
            third = adapted.logits.save()
    for logits, number in ((first, 1), (second, 2), (third, 0)):
        same(await logits, generation(merges[number], PROMPT, 1).logits)


async def test_plain_requests_and_edits(adapted, adapters, merges):
    vector = torch.randn(128, generator=torch.Generator().manual_seed(1))

    def adds(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            model.model.layers[1].output[0][:] += vector

    edit = await adapted.edit(adds)
    (output,) = await adapted.generate(PROMPT, lora_request=adapters[2], **GREEDY)
    wanted = generation(merges[3], PROMPT, STEPS, {1: lambda hidden: hidden + vector})
    assert list(output.outputs[0].token_ids) == wanted.ids
    await edit.clear()
    (output,) = await adapted.generate(PROMPT, lora_request=adapters[2], **GREEDY)
    assert list(output.outputs[0].token_ids) == generation(merges[3], PROMPT, STEPS).ids


# -- what can be wrong with them ---------------------------------------------------------------------------------------


def broken(hf: Any, folder: Path) -> dict[str, str]:
    """Folders with adapters that cannot be loaded, and what is said of each."""
    config = folder / "config"
    config.mkdir()
    (config / "adapter_config.json").write_text("{")
    large = write(hf, folder / "large", 9, rank=16)
    torn = Path(write(hf, folder / "torn", 9))
    weights = torn / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    return {
        "/no/such/adapter": "No adapter found",
        str(config): "Expecting",
        large: "rank",
        str(torn): "cannot be loaded",
    }


async def test_a_broken_adapter_fails_the_request_that_names_it(adapted, hf, merges, adapters, tmp_path):
    async def healthy() -> None:
        (output,) = await adapted.generate(PROMPT, lora_request=adapters[0], **GREEDY)
        assert list(output.outputs[0].token_ids) == generation(merges[1], PROMPT, STEPS).ids

    for path, said in broken(hf, tmp_path).items():
        lora, going = LoRARequest("broken", 9, path), asyncio.create_task(healthy())
        with pytest.raises(AdapterError, match=said):
            await adapted.generate(PROMPT, lora_request=lora, **GREEDY)
        async with adapted.trace(PROMPT, lora_request=lora, **GREEDY):
            logits = adapted.logits.save()
        with pytest.raises(AdapterError, match=said):
            await logits
        with pytest.raises(AdapterError, match=said):
            await adapted.add_lora(lora)
        await going
    await healthy()
    await drained(adapted)


async def test_a_broken_adapter_of_a_request_from_elsewhere(adapted, adapters, merges):
    async def last(lora: LoRARequest) -> Any:
        params = SamplingParams(**GREEDY)
        prompt = {"prompt_token_ids": PROMPT}
        found = adapted.vllm_entrypoint.generate(prompt, params, f"own-{lora.lora_name}", lora_request=lora)
        return [output async for output in found][-1]

    with pytest.raises(Exception, match=r"^$|cannot be loaded") as caught:
        await asyncio.wrap_future(adapted._engine.call(last(LoRARequest("broken", 9, "/no/such/adapter"))))
    assert isinstance(caught.value.__cause__ or caught.value, AdapterError)
    output = await asyncio.wrap_future(adapted._engine.call(last(adapters[0])))
    assert list(output.outputs[0].token_ids) == generation(merges[1], PROMPT, STEPS).ids
    await drained(adapted)


async def test_loading_ahead_and_unloading(adapted, hf, tmp_path):
    lora = LoRARequest("ahead", 7, write(hf, tmp_path / "ahead", 7))
    await adapted.add_lora(lora)
    assert 7 in await adapted.list_loras()
    with pytest.raises(AdapterError, match=r"knows \('ahead', 7, .*remove_lora"):
        await adapted.add_lora(LoRARequest("another", 7, lora.lora_path))
    with pytest.raises(AdapterError, match="a name and a number of its own"):
        await adapted.generate(PROMPT, lora_request=LoRARequest("ahead", 8, lora.lora_path))
    with pytest.raises(TypeError, match="LoRARequest is expected"):
        await adapted.generate(PROMPT, lora_request="ahead")
    assert await adapted.remove_lora(7)
    assert 7 not in await adapted.list_loras()
    assert not await adapted.remove_lora(7)
    await adapted.add_lora(LoRARequest("another", 7, lora.lora_path))
    await adapted.remove_lora(7)


async def test_no_request_reads_prefixes_of_weights_that_were_exchanged(adapted, hf, tmp_path):
    prompt = [*range(20, 20 + 2 * BLOCK + 5)]
    folders = [write(hf, tmp_path / str(seed), seed) for seed in (11, 12)]
    first, second = (generation(merged(hf, folder), prompt, STEPS).ids for folder in folders)

    async def run(folder: str, **more: Any) -> tuple[list[int], int]:
        lora = LoRARequest("exchanged", 11, folder, **more)
        (output,) = await adapted.generate(prompt, lora_request=lora, **GREEDY)
        return list(output.outputs[0].token_ids), output.num_cached_tokens

    assert first != second
    assert await run(folders[0]) == (first, 0)
    assert await run(folders[0]) == (first, 2 * BLOCK)
    assert await run(folders[1], load_inplace=True) == (second, 0)
    assert await run(folders[1]) == (second, 2 * BLOCK)
    await adapted.remove_lora(11)
    assert await run(folders[0]) == (first, 0)
    await adapted.remove_lora(11)


async def test_an_adapter_that_requests_use_stays(adapted, hf, tmp_path):
    """Another one of its number would take its place in their next step."""
    lora, refused = LoRARequest("used", 8, write(hf, tmp_path / "used", 8)), tmp_path / "refused"
    async with adapted.trace(PROMPT, lora_request=lora, **LONG) as tracer:
        for step in tracer.iter[:]:
            logits = adapted.logits.save()
            if step >= 20 and refused.exists():
                tracer.stop()
    llm, params = adapted.vllm_entrypoint, SamplingParams(**LONG)
    stream = tracer.stream()
    await anext(stream)
    with pytest.raises(AdapterError, match=r"adapter 8 is used by requests that still go \(1\)"):
        await adapted.remove_lora(8)
    refused.touch()
    ids = list((await tracer.result).outputs[0].token_ids)
    wanted = generation(merged(hf, lora.lora_path), PROMPT, len(ids)).ids
    assert ids == wanted
    assert int((await logits).argmax()) == wanted[-1]

    async def from_elsewhere() -> None:
        outputs = llm.generate({"prompt_token_ids": PROMPT}, params, "used", lora_request=lora)
        await anext(outputs)
        with pytest.raises(AdapterError, match="adapter 8 is used"):
            await adapted._engine.adapters.remove(8)
        await outputs.aclose()

    await asyncio.wrap_future(adapted._engine.call(from_elsewhere()))
    await drained(adapted)
    async with adapted.trace(PROMPT, lora_request=lora, **LONG) as tracer:
        adapted.logits.save()
    await anext(tracer.stream())  # which ends with this line
    assert await adapted.remove_lora(8)
    await drained(adapted)


async def test_an_engine_that_takes_none(model, adapters):
    for use in (model.add_lora, lambda lora: model.generate(PROMPT, lora_request=lora)):
        with pytest.raises(AdapterError, match="enable_lora=True"):
            await use(adapters[0])
    assert await model.list_loras() == set()
