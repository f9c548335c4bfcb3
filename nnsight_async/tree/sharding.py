"""The whole shape of a parameter of which this rank holds a shard.

Read off the layers of vLLM 0.32 and 0.33 by class name and attribute, so that nothing of vLLM is imported here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]


def whole(module: torch.nn.Module, name: str, value: torch.Tensor) -> tuple[Shape, int | None]:
    """Shape of the whole parameter and the dimension it is split along, None if it is not split.

    Embeddings and LM heads count vLLM's padding rows. Key and value heads that several ranks hold count once.
    """
    classes = {cls.__name__ for cls in type(module).__mro__}
    layer = cast("Any", module)
    if "RoutedExperts" in classes or "FusedMoE" in classes:
        return _experts(layer, name, tuple(value.shape))
    if getattr(layer, "tp_size", 1) == 1:
        return tuple(value.shape), None
    if "RowParallelLinear" in classes:
        if name.startswith("bias"):
            return tuple(value.shape), None
        return _scaled(value, "input_dim", layer.input_size_per_partition, layer.input_size)
    if "ColumnParallelLinear" in classes or "VocabParallelEmbedding" in classes:
        return _scaled(value, "output_dim", layer.output_size_per_partition, _output_size(layer))
    return tuple(value.shape), None


def _output_size(layer: Any) -> int:
    if getattr(layer, "num_kv_head_replicas", 1) == 1:
        return layer.output_size
    # vLLM counts a replicated head once per rank in output_size.
    surplus = (layer.num_kv_head_replicas - 1) * layer.total_num_kv_heads
    return layer.output_size - surplus * (layer.head_size + getattr(layer, "v_head_size", layer.head_size))


def _scaled(value: torch.Tensor, attribute: str, part: int, full: int) -> tuple[Shape, int | None]:
    shape = tuple(value.shape)
    dim: int | None = getattr(value, attribute, None)
    if dim is None:  # lost where a method replaced the parameter after loading
        dim = next((place for place, size in enumerate(shape) if size == part), None)
    if dim is None or dim >= len(shape):
        return shape, None
    # A packed weight has fewer rows than features: scale instead of inserting the size.
    return _with(shape, dim, shape[dim] * full // part), dim


def _experts(layer: Any, name: str, shape: Shape) -> tuple[Shape, int | None]:
    local, total = getattr(layer, "local_num_experts", 1), getattr(layer, "global_num_experts", 1)
    if local < total:
        return (_with(shape, 0, total), 0) if shape and shape[0] == local else (shape, None)
    tp_size = _experts_tp_size(layer)
    dim = {"w13_weight": 1, "w13_bias": 1, "w2_weight": 2}.get(name)
    if tp_size == 1 or dim is None or dim >= len(shape):
        return shape, None
    return _with(shape, dim, shape[dim] * tp_size), dim


def _experts_tp_size(layer: Any) -> int:
    config = getattr(layer, "moe_config", None)
    return getattr(config, "tp_size", None) or getattr(layer, "tp_size", 1)


def _with(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])
