"""Two stages, on engines of their own: requests that are preempted, other architectures, stages that end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from nnsight_async import VLLM, BlockTimeoutError, EngineDeadError, save
from nnsight_async.testing import hf_model, tiny_checkpoint
from tests.parallel.compare import PROMPT, assert_close, values
from tests.parallel.conftest import RANKS, divided
from tests.parallel.test_other_models import build_args, everything
from tests.semantics.test_programs import CROWD, FEW, Stage, hold

pytestmark = pytest.mark.slow

TWO_STAGES: dict[str, Any] = {"tensor_parallel_size": 1, "pipeline_parallel_size": RANKS}


@pytest.fixture(scope="module", params=["gpt2", "qwen3", "qwen3_moe"])
def checkpoint(request: pytest.FixtureRequest) -> str:
    return tiny_checkpoint(request.param)


@pytest.fixture(scope="module")
def single(checkpoint: str) -> Iterator[VLLM]:
    engine = VLLM(checkpoint, mode="async", dispatch=True, **build_args())
    yield engine
    engine.close()


def test_every_value_of_other_architectures_is_that_of_one_engine(checkpoint, single):
    with divided(checkpoint, **TWO_STAGES) as staged:
        assert_close(values(staged, everything), values(single, everything))


def test_programs_that_are_preempted():
    with divided(
        tiny_checkpoint("llama"), max_model_len=96, block_size=32, num_gpu_blocks_override=6, **TWO_STAGES
    ) as model:
        stage = Stage("two stages that preempt", model, hf_model("llama"))
        before = stage.replays()
        hold(stage, CROWD, FEW)
        assert stage.replays() > before


@pytest.mark.parametrize("layer", [0, 3])
def test_a_block_that_does_not_come_back_is_ended(staged, layer):
    def endless(model: Any, tracer: Any) -> None:
        save(model.model.layers[layer].mlp.output, "mlp")
        while True:
            pass

    with pytest.raises(BlockTimeoutError):
        staged.run(PROMPT, endless, max_tokens=2).result()
    values(staged, everything)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_is_killed_ends_the_engine(stage):
    with divided(tiny_checkpoint("llama"), **TWO_STAGES) as model:
        values(model, everything)
        children = psutil.Process().children(recursive=True)
        (worker,) = [each for each in children if f"Worker_PP{stage}" in " ".join(each.cmdline())]
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            values(model, everything, steps=100)
