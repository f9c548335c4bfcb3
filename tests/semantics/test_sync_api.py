"""The synchronous surface, from an undispatched model to a closed one. Its tests follow the life of one engine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from nnsight_async import VLLM, EngineClosedError, OutsideBlockError, RunCancelledError, SurfaceError, save
from nnsight_async.testing.oracle import generation
from tests.conftest import LONG, engine_args_for_long

pytestmark = pytest.mark.backends("vllm")

PROMPT = [5, 17, 101, 9, 33]
GREEDY = {"temperature": 0.0, "ignore_eos": True}
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def lazy(llama: str) -> Iterator[VLLM]:
    model = VLLM(llama, **engine_args_for_long())
    yield model
    model.close()


def test_a_model_that_is_not_dispatched_shows_its_tree_without_weights(llama, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(llama, name), tmp_path)
    model = VLLM(str(tmp_path), dtype="float32")
    assert not model.dispatched
    assert model.vllm_entrypoint is None
    assert "(0-3): 4 x LlamaDecoderLayer" in repr(model)
    assert "lm_head" in dir(model)
    with pytest.raises(OutsideBlockError):
        model.model.layers[0].output
    model.close()
    with pytest.raises(EngineClosedError):
        model.generate(PROMPT)


def test_wrong_arguments(llama):
    with pytest.raises(TypeError, match="max_model_len"):
        VLLM(llama, max_modle_len=64)
    with pytest.raises(ValueError, match="'sync' or 'async'"):
        VLLM(llama, mode="asink")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="worker_cls"):
        VLLM(llama, worker_cls="mine")


def test_wrong_requests_are_refused_at_the_call(lazy):
    with pytest.raises(TypeError, match="temperature"):
        lazy.trace(PROMPT, temprature=0.0)
    with pytest.raises(ValueError, match="temperature"):
        lazy.trace(PROMPT, temperature=-1.0)
    with pytest.raises(ValueError, match="empty"):
        lazy.trace("")
    with pytest.raises(ValueError, match="one prompt"):
        lazy.trace(["one", "two"])
    with pytest.raises(TypeError):
        lazy.trace(3.5)
    assert not lazy.dispatched


def test_the_first_trace_builds_the_engine(lazy, hf):
    assert not lazy.dispatched
    with lazy.trace(PROMPT, max_tokens=1, **GREEDY):
        logits = lazy.logits.save()
    assert lazy.dispatched
    assert logits.device.type == "cpu"
    assert not logits.is_inference()
    torch.testing.assert_close(logits[0], generation(hf, PROMPT, 1).logits[0], **CLOSE)


def test_the_example_of_the_first_page(lazy, hf):
    with lazy.trace("The capital of France is", temperature=0.0):
        logits = lazy.logits.save()
    ids = lazy.tokenizer("The capital of France is")["input_ids"]
    best = generation(hf, ids, 1).ids
    assert lazy.tokenizer.decode(logits.argmax(-1)) == lazy.tokenizer.decode(best)


def test_values_results_and_tokens_after_the_with(lazy, hf):
    expected = generation(hf, PROMPT, 4)
    with lazy.trace(PROMPT, max_new_tokens=4, **GREEDY) as tracer:
        kept = save([])
        for _ in tracer.iter[:]:
            kept.append(lazy.logits)
    assert list(tracer.result.outputs[0].token_ids) == expected.ids
    torch.testing.assert_close(torch.cat(kept), expected.logits, **CLOSE)
    assert torch.equal(torch.cat(tracer.saves["kept"]), torch.cat(kept))
    assert [token.id for token in tracer.stream()] == expected.ids


def test_the_function_form_and_plain_requests(lazy, hf):
    expected = generation(hf, PROMPT, 3)

    def probe(model: Any, tracer: Any) -> None:
        tracer.save(model.logits, "first")

    result = lazy.run(PROMPT, probe, max_tokens=3, **GREEDY).result()
    torch.testing.assert_close(result.saves["first"][0], expected.logits[0], **CLOSE)
    outputs = lazy.generate([PROMPT, PROMPT[:2]], max_tokens=3, **GREEDY)
    assert list(outputs[0].outputs[0].token_ids) == expected.ids
    assert list(outputs[1].outputs[0].token_ids) == generation(hf, PROMPT[:2], 3).ids


def test_leaving_the_stream_of_a_run_early(lazy):
    run = lazy.run(PROMPT, lambda model, tracer: model.logits, **LONG)
    for _ in run.stream():
        break
    with pytest.raises(RunCancelledError):
        run.result()
    with pytest.raises(RunCancelledError):
        run.saves.result()


def test_the_users_extra_args_are_kept(lazy):
    with lazy.trace(PROMPT, max_tokens=1, extra_args={"mine": 3}) as tracer:
        logits = lazy.logits.save()
    assert logits.shape == (1, 512)


async def test_the_async_form_on_a_sync_model(lazy):
    with pytest.raises(SurfaceError, match='mode="async"'):
        async with lazy.trace(PROMPT):
            lazy.logits.save()


async def test_the_sync_form_in_a_loop_of_an_async_model(model):
    with pytest.raises(SurfaceError, match="async with"), model.trace(PROMPT):
        model.logits.save()


def test_closing_ends_what_goes_on_and_all_after(lazy):
    failures: list[BaseException] = []
    begun = threading.Event()

    def goes_on() -> None:
        run = lazy.run(PROMPT, lambda model, tracer: model.logits, **LONG)
        try:
            for _ in run.stream():
                begun.set()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=goes_on)
    thread.start()
    assert begun.wait(timeout=120)
    processes = psutil.Process(lazy_core(lazy)).children(recursive=True)
    lazy.close()
    lazy.close()
    thread.join(timeout=60)
    assert [type(error) for error in failures] == [EngineClosedError]
    assert not lazy.dispatched
    assert lazy.vllm_entrypoint is None
    _, left = psutil.wait_procs(processes, timeout=60)
    assert not left
    for use in (lambda: lazy.generate(PROMPT), lazy.dispatch, lazy.stats, lambda: traced(lazy)):
        with pytest.raises(EngineClosedError):
            use()


def lazy_core(model: VLLM) -> int:
    return model.vllm_entrypoint.engine_core.resources.engine_manager.processes[0].pid


def traced(model: VLLM) -> None:
    with model.trace(PROMPT):
        model.logits.save()


# -- scripts -----------------------------------------------------------------------------------------------------------

SCRIPT = """
from __future__ import annotations

import psutil

from nnsight_async import VLLM
from nnsight_async.testing import tiny_checkpoint
from nnsight_async.testing.engine import tiny_engine_args

{build}
{guard}
    with model.trace([5, 17, 101, 9, 33], temperature=0.0):
        logits = model.logits.save()
    print(int(logits.argmax(-1)))
    print(*(child.pid for child in psutil.Process().children(recursive=True)))
"""
BUILD = "model = VLLM(tiny_checkpoint('llama'), **tiny_engine_args())"


def script(folder: Path, **parts: str) -> subprocess.CompletedProcess[str]:
    file = folder / "script.py"
    file.write_text(SCRIPT.format(**parts))
    return subprocess.run(
        [sys.executable, str(file)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )


def test_a_script_ends_quietly_without_close(tmp_path, hf):
    ended = script(tmp_path, build=BUILD, guard="if __name__ == '__main__':")
    for word in ("Traceback", "Error", "Exception ignored", "ResourceWarning", "leaked", "nnsight_async/"):
        assert word not in ended.stderr
    assert ended.returncode == 0
    best, processes = ended.stdout.splitlines()
    assert int(best) == generation(hf, PROMPT, 1).ids[0]
    assert processes
    mentioned = set(map(int, processes.split()))
    running = [process for process in psutil.process_iter() if process.pid in mentioned]  # one may end a moment later
    _, left = psutil.wait_procs(running, timeout=60)
    assert not left


def test_a_script_without_a_main_guard_is_told(tmp_path):
    ended = script(tmp_path, build=BUILD, guard="if True:")
    assert ended.returncode == 1
    assert "MainGuardError" in ended.stderr
    assert 'if __name__ == "__main__":' in ended.stderr
    assert ended.stderr.count("Traceback") == 1
    assert ended.stdout == ""
