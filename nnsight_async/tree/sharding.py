"""The shapes of a parameter: the shard that this rank holds, and the whole.

Read off the layers of vLLM 0.32 and 0.33 by class name and attribute, so that nothing of vLLM is imported here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]


def shapes(module: torch.nn.Module, name: str, value: torch.Tensor) -> tuple[Shape, Shape, int | None]:
    """Shape of this rank's part, shape of the whole, and the dimension that is split, None if none is.

    Embeddings and LM heads count vLLM's padding rows. Key and value heads that several ranks hold count once.
    """
    classes = {cls.__name__ for cls in type(module).__mro__}
    layer = cast("Any", module)
    part = _part(layer, name, value, classes)
    if "RoutedExperts" in classes or "FusedMoE" in classes:
        return part, *_experts(layer, name, part)
    if getattr(layer, "tp_size", 1) == 1:
        return part, part, None
    if "RowParallelLinear" in classes and not name.startswith("bias"):
        dim = _dim(value, "input_dim", part, layer.input_size_per_partition)
        return part, *_scaled(part, dim, layer.input_size_per_partition, layer.input_size)
    if "ColumnParallelLinear" in classes or "VocabParallelEmbedding" in classes:
        dim = _dim(value, "output_dim", part, layer.output_size_per_partition)
        return part, *_scaled(part, dim, layer.output_size_per_partition, _output_size(layer))
    return part, part, None


def _part(layer: Any, name: str, value: torch.Tensor, classes: set[str]) -> Shape:
    # On a CPU vLLM packs the weights of linear layers elsewhere and leaves an empty tensor behind.
    if name == "weight" and value.numel() == 0 and "LinearBase" in classes:
        rows = getattr(layer, "output_size_per_partition", layer.output_size)
        return (rows, getattr(layer, "input_size_per_partition", layer.input_size))
    return tuple(value.shape)


def _output_size(layer: Any) -> int:
    if getattr(layer, "num_kv_head_replicas", 1) == 1:
        return layer.output_size
    # vLLM counts a replicated head once per rank in output_size.
    surplus = (layer.num_kv_head_replicas - 1) * layer.total_num_kv_heads
    return layer.output_size - surplus * (layer.head_size + getattr(layer, "v_head_size", layer.head_size))


def _dim(value: torch.Tensor, attribute: str, part: Shape, size: int) -> int | None:
    declared: int | None = getattr(value, attribute, None)
    if declared is not None and declared < len(part):
        return declared
    # The attribute is lost where a quantisation method replaces the parameter after loading. Torch's order is output
    # first, input last: the guess that holds for a square one.
    places = [place for place, length in enumerate(part) if length == size]
    if not places:
        return None
    return places[0] if attribute == "output_dim" else places[-1]


def _scaled(part: Shape, dim: int | None, local: int, total: int) -> tuple[Shape, int | None]:
    if dim is None:
        return part, None
    # A packed weight has fewer rows than features: scale instead of inserting the size.
    return _with(part, dim, part[dim] * total // local), dim


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
