from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight_async.testing import hf_model
from nnsight_async.tree.describe import describe
from nnsight_async.tree.manifest import Manifest, ModuleInfo
from nnsight_async.tree.record import record

IDS = torch.tensor([[1, 2, 3]])


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
def test_every_module_and_parameter_of_torch_is_there(name: str) -> None:
    model = hf_model(name)

    manifest = describe(model)

    named = dict(model.named_modules(remove_duplicate=False))
    assert list(manifest.modules) == list(named)
    for path, module in named.items():
        info = manifest.modules[path]
        assert info.qualified == f"{type(module).__module__}.{type(module).__qualname__}"
        assert info.children == tuple(module._modules)
        found = {parameter.name: (parameter.shape, parameter.dtype) for parameter in info.parameters}
        assert found == {key: (tuple(value.shape), "float32") for key, value in module.named_parameters(recurse=False)}


def test_only_lists_and_aliases_are_unreadable_before_recording(manifest: Manifest) -> None:
    unreadable = {path for path, info in manifest.modules.items() if not info.reachable}

    assert unreadable == {"model.layers", "model.layers.1.act", "model.layers.2.act"}
    assert not manifest.recorded


def test_recording_marks_what_was_not_called(toy: Any) -> None:
    manifest = describe(toy, calls=record(toy, lambda: toy(IDS)))

    assert manifest.recorded
    assert manifest.modules["model.layers.0.unused"].reason == "not called in a forward pass"
    assert manifest.modules["model.layers.0.mlp"].reason is None
    assert manifest.modules["model"].entries == (1,)


def test_a_shared_module_keeps_its_first_path(manifest: Manifest) -> None:
    first, second = manifest.modules["model.layers.0.act"], manifest.modules["model.layers.1.act"]

    assert first.aliases == ("model.layers.1.act", "model.layers.2.act")
    assert first.alias_of is None
    assert second.alias_of == first.path
    assert second.reason == "the same module as model.model.layers[0].act; read it there"


def test_modules_that_bypass_torch_hooks_are_told_apart(manifest: Manifest) -> None:
    assert not manifest.modules["model"].torch_hooks
    assert manifest.modules["model.embed"].torch_hooks


class ParallelLMHead(torch.nn.Linear):
    """Has the name of vLLM's class, which is never called."""


@pytest.mark.parametrize("tied", [False, True])
def test_an_lm_head_points_to_the_logits(toy: Any, tied: bool) -> None:
    toy.lm_head = toy.model.embed if tied else ParallelLMHead(4, 7)

    reason = describe(toy).modules["lm_head"].reason

    assert reason is not None
    assert "read model.logits or logits_processor" in reason


def test_a_module_that_contains_itself_does_not_recurse(toy: Any) -> None:
    toy.model.parent = toy

    manifest = describe(toy)

    assert "parent" not in manifest.modules["model"].children


def test_meta_tensors_and_broken_representations_are_described(toy: Any) -> None:
    toy.lm_head.in_features = property  # extra_repr formats it
    toy.lm_head.extra_repr = lambda: 1 / 0

    manifest = describe(toy.to("meta"))

    assert manifest.modules["lm_head"].extra == ""


def test_a_manifest_survives_its_encoding(toy: Any) -> None:
    manifest = describe(toy, repo="toy", vllm_version="1", calls=record(toy, lambda: toy(IDS)))

    assert Manifest.decode(manifest.encode()) == manifest


class LinearBase(torch.nn.Module):
    """Carries the attributes of vLLM's linear layers that sharding is read from."""

    def __init__(self, shape: tuple[int, ...], **attributes: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(shape, device="meta"))
        self.tp_size = 2
        for name, value in attributes.items():
            setattr(self, name, value)


class ColumnParallelLinear(LinearBase): ...


class RowParallelLinear(LinearBase): ...


class RoutedExperts(LinearBase): ...


COLUMN = {"output_size": 12, "output_size_per_partition": 6, "input_size": 4}
ROW = {"input_size": 12, "input_size_per_partition": 6, "output_size": 4}
# One key/value head of size 2 on two ranks: vLLM counts it twice in output_size.
REPLICATED = {**COLUMN, "num_kv_head_replicas": 2, "total_num_kv_heads": 1, "head_size": 2}


@pytest.mark.parametrize(
    ("layer", "shape", "full_shape", "dim"),
    [
        (ColumnParallelLinear((6, 4), **COLUMN), (6, 4), (12, 4), 0),
        (ColumnParallelLinear((3, 4), **COLUMN), (3, 4), (3, 4), None),
        (ColumnParallelLinear((0,), **COLUMN), (6, 4), (12, 4), 0),
        (ColumnParallelLinear((6, 4), **REPLICATED), (6, 4), (8, 4), 0),
        (RowParallelLinear((4, 6), **ROW), (4, 6), (4, 12), 1),
        (RowParallelLinear((0,), **ROW, output_size_per_partition=6), (6, 6), (6, 12), 1),
        (RoutedExperts((8, 4, 6), local_num_experts=8, global_num_experts=8), (8, 4, 6), (8, 4, 6), None),
        (RoutedExperts((4, 4, 6), local_num_experts=4, global_num_experts=8), (4, 4, 6), (8, 4, 6), 0),
        (LinearBase((4, 6)), (4, 6), (4, 6), None),
    ],
)
def test_shards_know_the_whole(
    layer: torch.nn.Module, shape: tuple[int, ...], full_shape: tuple[int, ...], dim: int | None
) -> None:
    info: ModuleInfo = describe(layer).root

    assert info.parameters[0].shape == shape
    assert info.parameters[0].full_shape == full_shape
    assert info.parameters[0].shard_dim == dim
