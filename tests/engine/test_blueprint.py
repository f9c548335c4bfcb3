from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nnsight_async.engine.blueprint import build_manifest, describing, vllm_version
from nnsight_async.errors import EngineStartError
from nnsight_async.testing import quiet_environment, tiny_checkpoint
from nnsight_async.tree import cache
from nnsight_async.tree.manifest import Manifest

FLOAT32 = {"dtype": "float32"}
REAL = Path(__file__).with_name("real_manifest.py")


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NNSIGHT_ASYNC_CACHE", str(tmp_path))
    return tmp_path


def real_manifest(checkpoint: str, answer: Path, **environment: str) -> Manifest:
    """What a real engine says of itself, with the order of one forward pass."""
    command = [sys.executable, str(REAL), checkpoint, str(answer)]
    environ = {**os.environ, **quiet_environment(), **environment}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return Manifest.decode(answer.read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "qwen3_moe"])
def test_the_tree_is_the_one_that_the_engine_has(name: str, fresh_cache: Path, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(name)

    blueprint = build_manifest(checkpoint, FLOAT32)
    real = real_manifest(checkpoint, tmp_path / "real")

    assert list(blueprint.modules) == list(real.modules)
    assert (blueprint.recorded, real.recorded) == (False, True)
    for path, info in blueprint.modules.items():
        other = real.modules[path]
        assert (info.qualified, info.children, info.parameters) == (other.qualified, other.children, other.parameters)
        assert (info.alias_of, info.torch_hooks) == (other.alias_of, other.torch_hooks)
        # The engine knows more modules to be out of reach, because it has seen a forward pass.
        assert info.reachable or info.reason == other.reason


@pytest.mark.slow
def test_shards_of_two_ranks_know_the_shapes_of_one(llama: str, tmp_path: Path) -> None:
    blueprint = build_manifest(llama, {**FLOAT32, "tensor_parallel_size": 2})
    real = real_manifest(llama, tmp_path / "real", TP="2", VLLM_CPU_OMP_THREADS_BIND="0|1")

    for path, info in blueprint.modules.items():
        whole = {parameter.name: parameter.shape for parameter in info.parameters}
        assert {parameter.name: parameter.full_shape for parameter in real.modules[path].parameters} == whole
    attention = "model.layers.0.self_attn"
    assert real.modules[f"{attention}.qkv_proj"].parameters[0].shard_dim == 0
    assert real.modules[f"{attention}.o_proj"].parameters[0].shard_dim == 1
    assert real.modules["model.norm"].parameters[0].shard_dim is None


ALONE = """
import json, sys
from nnsight_async.engine.blueprint import build_manifest
manifest = build_manifest(sys.argv[1], {"dtype": "float32"})
loaded = [name for name in ("torch", "vllm", "transformers") if name in sys.modules]
import torch
from vllm.config import get_current_vllm_config_or_none
print(json.dumps({
    "modules": len(manifest.modules),
    "loaded": loaded,
    "distributed": torch.distributed.is_initialized(),
    "config": get_current_vllm_config_or_none() is not None,
}))
"""


@pytest.mark.slow
def test_nothing_of_it_stays_in_the_process(llama: str, fresh_cache: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", ALONE, llama], capture_output=True, timeout=300, check=True)

    answer = json.loads(ended.stdout.splitlines()[-1])
    assert answer["modules"] > 50
    assert (answer["loaded"], answer["distributed"], answer["config"]) == ([], False, False)


@pytest.mark.slow
def test_a_second_build_comes_from_the_cache(llama: str, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build_manifest(llama, FLOAT32)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")

    assert build_manifest(llama, {**FLOAT32, "tensor_parallel_size": 4, "enforce_eager": False}) == first
    with pytest.raises(FileNotFoundError):
        build_manifest(llama, {"dtype": "bfloat16"})


NO_PLATFORM = """
import sys
from vllm import platforms
from vllm.platforms.interface import UnspecifiedPlatform
platforms._current_platform = UnspecifiedPlatform()  # what the CUDA build has on a machine without a GPU
from nnsight_async.engine import blueprint
manifest = blueprint._build(sys.argv[1], {}, "0")
assert "model.layers.0.self_attn.qkv_proj" in manifest.modules
"""


@pytest.mark.slow
def test_a_machine_without_a_platform_of_vllm_can_describe(llama: str) -> None:
    subprocess.run([sys.executable, "-c", NO_PLATFORM, llama], capture_output=True, timeout=300, check=True)


@pytest.mark.slow
def test_an_unknown_architecture_is_a_value_error_that_names_it(tmp_path: Path, fresh_cache: Path) -> None:
    config = {"architectures": ["NoSuchForCausalLM"], "model_type": "llama", "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(ValueError, match="NoSuchForCausalLM") as caught:
        build_manifest(str(tmp_path))

    assert "pydantic" not in str(caught.value)


@pytest.mark.slow
def test_a_repository_that_cannot_be_had_is_an_os_error(fresh_cache: Path) -> None:
    with pytest.raises(OSError, match=r"nobody/nothing"):
        build_manifest("nobody/nothing")


@pytest.mark.slow
def test_an_unknown_argument_is_a_type_error(llama: str, fresh_cache: Path) -> None:
    with pytest.raises(TypeError, match="no_such_argument"):
        build_manifest(llama, {"no_such_argument": 1})


def test_a_folder_that_is_not_there_is_refused_at_once() -> None:
    with pytest.raises(FileNotFoundError, match=r"/no/such/folder' does not exist"):
        build_manifest("/no/such/folder")


def test_a_process_that_dies_leaves_its_last_words(
    llama: str, fresh_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho noise\necho out of luck >&2\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))

    with pytest.raises(EngineStartError, match=r"exit status 3.*\n.*out of luck"):
        build_manifest(llama)


def test_arguments_that_do_not_shape_the_tree_are_left_out() -> None:
    import torch

    arguments = {"dtype": torch.float16, "seed": 3, "worker_cls": object(), "hf_overrides": {"num_hidden_layers": 1}}

    assert describing(arguments) == {"dtype": "float16", "hf_overrides": {"num_hidden_layers": 1}}
    with pytest.raises(TypeError, match=r"hf_overrides=.* dispatch=True"):
        describing({"hf_overrides": lambda config: config})


def test_the_version_is_known_without_importing_vllm() -> None:
    code = "import sys; from nnsight_async.engine.blueprint import vllm_version as v; print(v(), 'vllm' in sys.modules)"

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert ended.stdout.split() == [vllm_version(), "False"]
    assert cache.manifest_key("org/name", vllm_version=vllm_version(), layout={}, revision="a" * 40) is not None
