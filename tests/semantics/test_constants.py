"""Large tensors and modules that a block takes along: sent once to an engine, and each run's own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from nnsight_async import VLLM, ShippingError, save
from nnsight_async.testing.engine import tiny_engine_args

pytestmark = pytest.mark.backends("vllm", "transformers")

PROMPT = [5, 17, 101, 9, 33, 250, 77]
WIDTH, FEATURES = 128, 4096
EACH = 4 * WIDTH * FEATURES  # bytes of each of the two large weights
CLOSE = {"rtol": 1e-4, "atol": 1e-3}


class Autoencoder(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.encoder = nn.Parameter(torch.randn(WIDTH, FEATURES, generator=generator))
        self.decoder = nn.Parameter(torch.randn(FEATURES, WIDTH, generator=generator))
        self.calls = 0

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.relu(stream @ self.encoder) @ self.decoder


def is_right(sae: Autoencoder, stream: torch.Tensor, out: torch.Tensor) -> bool:
    with torch.no_grad():
        expected = torch.relu(stream @ sae.encoder) @ sae.decoder
    return torch.allclose(out, expected, **CLOSE)


async def applied(model: VLLM, sae: Autoencoder, prompt: list[int] = PROMPT) -> tuple[torch.Tensor, torch.Tensor]:
    async with model.trace(prompt, max_tokens=1):
        stream = model.model.layers[1].resid_post.save()
        out = sae(stream).save()
    return await stream, await out


async def held(model: VLLM) -> tuple[int, int]:
    stats = await model.stats()
    return stats["constants"], stats["constant_bytes"]


@pytest.mark.backends("vllm")
async def test_a_module_is_sent_once(model: VLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    rpc = model.vllm_entrypoint.collective_rpc

    def counting(method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "nnsight_receive":
            sent.append(kwargs["args"][0])
        return rpc(method, *args, **kwargs)

    monkeypatch.setattr(model.vllm_entrypoint, "collective_rpc", counting)
    sae = Autoencoder(1)

    before, before_bytes = await held(model)
    for _ in range(3):
        assert is_right(sae, *await applied(model, sae))
    await asyncio.gather(*(applied(model, sae) for _ in range(10)))
    after, after_bytes = await held(model)

    assert len(sent) == len(set(sent)) == 2
    assert (after - before, after_bytes - before_bytes) == (2, 2 * EACH)


async def test_a_module_that_was_changed_between_runs_is_the_new_one(model: VLLM) -> None:
    sae = Autoencoder(2)
    assert is_right(sae, *await applied(model, sae))

    with torch.no_grad():
        sae.encoder[:, 7] = 5.0
    assert is_right(sae, *await applied(model, sae))

    sae.decoder.data[3] += 9.0  # not counted by PyTorch
    assert is_right(sae, *await applied(model, sae))


async def test_a_module_that_is_changed_while_its_run_is_on_the_way_is_the_old_one(model: VLLM) -> None:
    sae = Autoencoder(3)
    async with model.trace(PROMPT, max_tokens=1):
        encoder = sae.encoder.sum(0).save()
    expected = sae.encoder.detach().sum(0)
    with torch.no_grad():
        sae.encoder.zero_()

    torch.testing.assert_close(await encoder, expected, **CLOSE)


async def test_what_a_block_does_to_its_module_stays_in_its_run(model: VLLM) -> None:
    sae = Autoencoder(4)

    async def changed(number: int) -> list[torch.Tensor]:
        async with model.trace(PROMPT, max_tokens=4, temperature=0.0, ignore_eos=True) as tracer:
            sums = save([])
            for _ in tracer.iter[:]:
                stream = model.model.layers[1].resid_post
                sae.encoder[:, number] += 1000.0
                sae.decoder.data[number].fill_(7.0)
                sae(stream)
                sums.append([sae.encoder[:, number].sum() - 128_000 * sae.calls, sae.decoder[number].sum()])
        return [torch.stack(each) for each in await tracer.saves["sums"]]

    async def unchanged() -> bool:
        return is_right(sae, *await applied(model, sae))

    runs = await asyncio.gather(*(changed(number) for number in range(8)), *(unchanged() for _ in range(8)))

    assert all(runs[8:])
    for number, steps in enumerate(runs[:8]):
        for encoder, decoder in steps:
            assert float(encoder) == pytest.approx(float(sae.encoder.detach()[:, number].sum()), abs=1.0)
            assert float(decoder) == 7.0 * WIDTH
    assert await unchanged()


async def test_runs_with_different_modules_at_the_same_time(model: VLLM) -> None:
    modules = [Autoencoder(10 + number) for number in range(4)]

    runs = await asyncio.gather(*(applied(model, sae, [number + 1, *PROMPT]) for number in range(3) for sae in modules))

    assert all(is_right(sae, *run) for run, sae in zip(runs, modules * 3, strict=True))


async def test_a_run_that_is_cancelled_while_its_module_is_on_the_way(model: VLLM) -> None:
    sae = Autoencoder(20)
    async with model.trace(PROMPT, max_tokens=50, ignore_eos=True) as tracer:
        total = sae.encoder.sum().save()
    await tracer.cancel()

    assert is_right(sae, *await applied(model, sae))


def test_a_map_sends_a_module_once_and_gives_each_prompt_its_own(model: VLLM) -> None:
    sae = Autoencoder(5)

    def probe(model: Any, tracer: Any) -> None:
        stream = model.model.layers[1].resid_post.save()
        out = sae(stream).save()
        calls = save(sae.calls)

    prompts = [[number, *PROMPT] for number in range(1, 9)]
    for result in model.map(prompts, probe, max_tokens=1, progress=False):
        assert result.saves["calls"] == 1
        assert is_right(sae, result.saves["stream"], result.saves["out"])


@pytest.fixture(scope="module")
def narrow(llama: str) -> Iterator[VLLM]:
    """A second engine, which keeps no more than one module."""
    engine = VLLM(llama, mode="async", dispatch=True, max_constant_bytes=5 << 20, **tiny_engine_args())
    yield engine
    engine.close()


@pytest.mark.slow
async def test_a_module_that_was_dropped_is_sent_again(narrow: VLLM) -> None:
    modules = [Autoencoder(number) for number in range(3)]

    for _ in range(2):
        for sae in modules:
            assert is_right(sae, *await applied(narrow, sae))
            assert await held(narrow) == (2, 2 * EACH)
    runs = await asyncio.gather(*(applied(narrow, sae) for sae in modules * 3))

    assert all(is_right(sae, *run) for run, sae in zip(runs, modules * 3, strict=True))
    assert (await held(narrow))[1] <= 5 << 20


@pytest.mark.slow
async def test_two_engines_each_get_it(model: VLLM, narrow: VLLM) -> None:
    sae = Autoencoder(30)

    runs = await asyncio.gather(*(applied(each, sae) for each in (model, narrow, model, narrow)))

    assert all(is_right(sae, *run) for run in runs)


@pytest.mark.slow
async def test_no_room_for_a_module_is_an_error_of_its_run(narrow: VLLM) -> None:
    sae, other = Autoencoder(31), Autoencoder(32)
    rpc = narrow.vllm_entrypoint.collective_rpc

    async def full(method: str, *args: Any, **kwargs: Any) -> Any:
        return ["OutOfMemoryError: full"] if method == "nnsight_receive" else await rpc(method, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(narrow.vllm_entrypoint, "collective_rpc", full)
        with pytest.raises(ShippingError, match="full"):
            await applied(narrow, sae)

    assert is_right(other, *await applied(narrow, other))
    assert is_right(sae, *await applied(narrow, sae))
