"""Two ranks do what one does: other architectures, keys that both ranks hold, adapters, preemption, the V2 runner."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM
from vllm.lora.request import LoRARequest

from nnsight_async import VLLM, AdapterError, save
from nnsight_async.testing import hf_model, tiny_checkpoint, v2_runner_environment
from nnsight_async.testing.oracle import generation
from tests.parallel.compare import CLOSE, PROMPT, assert_close, values
from tests.parallel.conftest import divided
from tests.semantics.test_lora import RANK, merged, write
from tests.semantics.test_programs import CROWD, FEW, Stage, hold

pytestmark = pytest.mark.slow

INNER = re.compile(r"\.1\..*(proj|c_\w+|norm|act\w*|attn|experts)\.output$")
ROOT = Path(__file__).parents[2]


def shared_keys(folder: Path) -> str:
    """A Llama with one head of keys and values, which both ranks have."""
    config = hf_model("llama").config
    config.num_key_value_heads = 1
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_checkpoint("llama")).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", params=["qwen3_moe", "shared keys", "gpt2", "qwen3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    if request.param == "shared keys":
        return shared_keys(tmp_path_factory.mktemp("shared_keys"))
    return tiny_checkpoint(request.param)


@pytest.fixture(scope="module")
def one(checkpoint: str) -> Iterator[VLLM]:
    engine = VLLM(checkpoint, mode="async", dispatch=True, **build_args())
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def two(checkpoint: str) -> Iterator[VLLM]:
    with divided(checkpoint) as engine:
        yield engine


def build_args() -> dict[str, Any]:
    from nnsight_async.testing.engine import tiny_engine_args

    return tiny_engine_args()


def everything(model: Any, tracer: Any) -> None:
    tracer.save(tracer.cache(include_inputs=True), "cache")
    for _ in tracer.iter[:]:
        save(model.logits, "logits")


def edits_in(paths: list[tuple[str, str]]) -> Callable[[Any, Any], None]:
    """Adds noise to the first tensor of a value at each of these modules, in all steps."""

    def first(value: Any) -> torch.Tensor:
        while not isinstance(value, torch.Tensor):
            value = value[0]
        return value

    def probe(model: Any, tracer: Any) -> None:
        for step in tracer.iter[:]:
            for path, kind in paths:
                module = model
                for part in path.split("."):
                    module = module[int(part)] if part.isdecimal() else getattr(module, part)
                value = first(getattr(module, kind))
                value += torch.randn(value.shape, generator=torch.Generator().manual_seed(step)) / 4
                save(first(getattr(module, kind)), f"{path}.{kind} {step}")
            save(model.logits, f"logits {step}")

    return probe


def test_every_value_and_edit_is_that_of_one_rank(one, two):
    found, wanted = values(two, everything), values(one, everything)
    missing = wanted["cache"].keys() - found["cache"].keys()
    assert not missing
    assert_close(found, wanted)
    places = [tuple(key.rsplit(".", 1)) for key in found["cache"] if INNER.search(key)]
    assert len(places) >= 5
    for place in sorted(places):
        probe = edits_in([place])
        assert_close(values(two, probe), values(one, probe), str(place))


# -- one engine each ---------------------------------------------------------------------------------------------------


def test_programs_that_are_preempted():
    with divided(tiny_checkpoint("llama"), max_model_len=96, block_size=32, num_gpu_blocks_override=6) as model:
        stage = Stage("two ranks that preempt", model, hf_model("llama"))
        before = stage.replays()
        hold(stage, CROWD, FEW)
        assert stage.replays() > before


def test_adapters(tmp_path):
    hf = hf_model("llama")
    lora = LoRARequest("a", 1, write(hf, tmp_path / "a", 1))
    with divided(tiny_checkpoint("llama"), enable_lora=True, max_lora_rank=2 * RANK) as model:

        def probe(model: Any, tracer: Any) -> None:
            attention = model.model.layers[0].self_attn
            save(attention.qkv_proj.input, "given")
            save(attention.qkv_proj.output[0], "qkv")
            save(model.model.layers[0].mlp.down_proj.input, "neurons")
            for _ in tracer.iter[:]:
                save(model.logits, "logits")

        result = model.run(PROMPT, probe, max_tokens=3, temperature=0.0, ignore_eos=True, lora_request=lora).result()
        oracle = merged(hf, lora.lora_path)
        wanted = generation(oracle, PROMPT, 3)
        assert list(result.outputs[0].token_ids) == wanted.ids
        torch.testing.assert_close(result.saves["logits"], wanted.logits[-1:], **CLOSE)
        weights = [getattr(oracle.model.layers[0].self_attn, f"{name}_proj").weight for name in "qkv"]
        torch.testing.assert_close(result.saves["qkv"], result.saves["given"] @ torch.cat(weights).T, **CLOSE)
        assert result.saves["neurons"].shape == (len(PROMPT), 256)
        with pytest.raises(AdapterError, match="cannot be loaded"):
            model.run(PROMPT, probe, max_tokens=1, lora_request=LoRARequest("b", 2, str(tmp_path / "none"))).result()
        assert asyncio.run(loaded(model)) == {1}


async def loaded(model: VLLM) -> set[int]:
    return await model.list_loras()


def test_two_ranks_under_the_v2_runner():
    chosen = "every_value_is or lands and fused or modules_are or random or without_blocks or come_back or stop_ends"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen]
    ended = subprocess.run(
        [*command, "tests/parallel/test_tensor_parallel.py"],
        cwd=ROOT,
        env={**os.environ, **v2_runner_environment()},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    passed = re.search(r"(\d+) passed", ended.stdout)
    assert passed is not None
    assert int(passed[1]) >= 8
