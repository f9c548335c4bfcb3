"""Engines with taps, where there are no graphs: blocks look at the taps alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nnsight_async import VLLM, NotATapError, UnsupportedError
from nnsight_async.serve.server import Server
from nnsight_async.testing.engine import tiny_engine_args

PROMPT = [5, 17, 101]
TAPS = ["model.layers[1].output", "model.layers[*].mlp.output", "model.layers[0].self_attn.source.rotary_emb_0.output"]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def tapped(llama: str) -> Iterator[VLLM]:
    with VLLM(llama, mode="async", dispatch=True, taps=TAPS, **tiny_engine_args()) as model:
        yield model


def told(model: Any, tracer: Any) -> None:
    for _ in tracer.iter[:]:
        tracer.save(model.model.layers[0].self_attn.source.rotary_emb_0.output[0], "queries")
        tracer.save(model.model.layers[1].resid_post, "stream")
        model.model.layers[2].mlp.output[:] *= 2
        tracer.save(model.logits, "logits")


async def test_taps_are_read_and_written_as_without_them(tapped: VLLM, vllm_model: VLLM) -> None:
    ours, expected = [await model.run(PROMPT, told, **GREEDY).saves for model in (tapped, vllm_model)]

    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (lambda model: model.model.layers[0].output, "layers[0].output"),
        (lambda model: model.model.layers[1].mlp.input, "layers[1].mlp.inputs"),
        (lambda model: model.model.layers[1].resid_mid, "layers[1].post_attention_layernorm.inputs"),
        (lambda model: model.model.norm.output, "norm.output"),
        (
            lambda model: model.model.layers[1].self_attn.source.attn_0.output,
            "layers[1].self_attn.source.attn_0.output",
        ),
    ],
)
async def test_every_other_place_is_refused_at_the_line_that_asks(tapped: VLLM, place: Any, said: str) -> None:
    def elsewhere(model: Any, tracer: Any) -> None:
        for step in tracer.iter[:]:
            if step == 2:
                tracer.save(place(model), "value")

    with pytest.raises(NotATapError) as caught:
        await tapped.run(PROMPT, elsewhere, **GREEDY).result

    assert f"model.model.{said} is not one of the taps" in str(caught.value)
    assert "in step 2 of the run" in "".join(caught.value.__notes__)


async def test_a_cache_collects_taps(tapped: VLLM) -> None:
    async with tapped.trace(PROMPT, max_tokens=1) as tracer:
        cache = tracer.cache().save()
    assert set(await cache) >= {"model.layers.1.output", "model.layers.0.mlp.output"}
    assert not {name for name in await cache if name in ("model.layers.0.output", "model.norm.output")}

    async with tapped.trace(PROMPT, max_tokens=1) as refused:
        refused.cache(modules=[tapped.model.norm]).save()
    with pytest.raises(NotATapError, match=r"norm\.output"):
        await refused.result


async def test_a_client_of_a_server_has_its_taps(tapped: VLLM) -> None:
    with Server(tapped, allow_python=True) as server:
        async with VLLM(tapped.repo, mode="async", serve=server.url) as client:
            assert client.taps == tapped.taps
            assert "model.model.layers[1].output" in client.taps
            ours, expected = [await model.run(PROMPT, told, **GREEDY).saves for model in (client, tapped)]
            torch.testing.assert_close(ours, expected)
            async with client.trace(PROMPT, max_tokens=1):
                value = client.model.norm.output.save()
            with pytest.raises(NotATapError, match=r"model\.model\.norm\.output is not one of the taps"):
                await value


def test_taps_are_locations_of_the_model_before_the_engine_is_built(llama: str) -> None:
    model = VLLM(llama, taps=["model.layers[0].mlp", "model.layers[3].input"])

    assert model.taps == ("model.model.layers[0].mlp.output", "model.model.layers[3].inputs")
    assert not model.dispatched


def test_taps_that_are_not_there_are_refused_before_the_engine_is_built(llama: str) -> None:
    with pytest.raises(ValueError, match=r"did you mean model\.model\.layers\[0\]\.mlp"):
        VLLM(llama, taps=["model.layers[0].mpl.output"])
    with pytest.raises(TypeError, match="a list of strings"):
        VLLM(llama, mode="async", taps="model.layers[0].mlp")  # type: ignore[arg-type]


def test_what_contradicts_taps_is_refused(llama: str) -> None:
    with pytest.raises(ValueError, match="enforce_eager=True replays none"):
        VLLM(llama, taps=["model.layers[0]"], enforce_eager=True)
    with pytest.raises(UnsupportedError, match="needs CUDA"):
        VLLM(llama, enforce_eager=False)
