"""The same tests under vLLM's V2 model runner, which Triton's interpreter makes possible on a CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from nnsight_async.testing import v2_runner_environment

ROOT = Path(__file__).parents[2]
TESTS = ["tests/semantics", "tests/worker"]
CHOSEN = (
    "against_transformers and llama or equal_prompts or different_steps or stop_ends or text_of_tokens "
    "or reaches_nobody or programs_in_batches or edits_run or is_complete or draws and greedy or hooks or in_use "
    "or declared_in_one_batch or declared_positions or operations_of_edits"
)


def test_the_runner_in_use(model):
    wanted = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
    with model.trace([5, 6, 7], max_tokens=1):
        logits = model.logits.save()
    assert logits.shape == (1, 512)
    assert model._engine.counts().result()["runner"] == ("V2Entry" if wanted else "V1Entry")


def test_semantics_hold_on_the_v2_runner():
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", CHOSEN, *TESTS]
    ended = subprocess.run(
        pytest,
        cwd=ROOT,
        env={**os.environ, **v2_runner_environment(), "NNSIGHT_ASYNC_BATCHES": "8"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    passed = re.search(r"(\d+) passed", ended.stdout)
    assert passed is not None
    assert int(passed[1]) >= 15
