"""How the ranks' values at each location make up whole ones, told at boot from the layers and one forward pass.

Layers are known by class name and attribute, read off vLLM 0.32 and 0.33. What no rule is for, and no rule's tensor, is
compared between the ranks: where they have the same it is whole, and else it is not known how it could be made so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch

from nnsight_async.errors import UnreadableError
from nnsight_async.interleave.functions import reach
from nnsight_async.interleave.instrument import instrument
from nnsight_async.interleave.layouts import Layout, Layouts, Pieces, Sum, Unknown
from nnsight_async.interleave.locations import Kind, Location
from nnsight_async.interleave.rows import Path
from nnsight_async.tree.callees import callee_of

QUERY_KEY = {"q_norm": False, "q_layernorm": False, "k_norm": True, "k_layernorm": True}
"""Norms of queries (False) and keys (True) beside an attention layer, by name."""

EXPERTS = ("MoERunner", "RoutedExperts", "FusedMoEMethodBase")
"""Classes of a layer of experts: what runs it, what holds the weights, and what computes with them."""

Print = tuple[tuple[int, ...], list[float]]
"""The shape of a tensor, and figures that tell it from others."""


class Observed:
    """Takes in a forward pass of this rank (`record`), and then finds the layouts of all that has passed."""

    def __init__(self, model: torch.nn.Module, kv_heads: int, ranks: int) -> None:
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._rules = Rules(self._modules, kv_heads, ranks)
        self._ruled: dict[tuple[Location, Path], Layout | None] = {}
        self._tensors: dict[tuple[Location, Path], torch.Tensor] = {}
        self._figures: dict[tuple[Location, Path], torch.Tensor] = {}

    def __call__(self, path: str, kind: Kind, value: Any) -> None:
        event = Location(path, kind)
        rules = self._rules.of(path, kind)
        if kind == "output" and self._rules.is_attention(path):
            for _, tensor in _tensors(value):
                tensor.fill_(1.0)  # nothing was computed, and vLLM (0.32, on a CPU) leaves what was there before
        for number, (where, tensor) in enumerate(_tensors(value)):
            place = event, where
            if place in self._tensors:
                continue
            self._tensors[place] = tensor  # kept, so that its identity stays its own
            self._figures[place] = _figures(tensor)
            rule = rules(number, where, tensor)
            if rule is not NO_RULE:
                self._ruled[place] = rule

    def layouts(self, compare: Callable[[Any], list[Any]]) -> Layouts:
        """`compare` returns what each rank gives to it; all ranks ask at once."""
        prints = {
            place: (tuple(self._tensors[place].shape), figures.tolist()) for place, figures in self._figures.items()
        }
        ranks: list[Mapping[tuple[Location, Path], Print]] = compare(prints)
        ruled = {id(self._tensors[place]): place for place, layout in self._ruled.items() if layout is not None}
        layouts = Layouts()
        layouts.called = called_modules(self._modules)
        for place, tensor in self._tensors.items():
            if place in self._ruled:
                layout = self._ruled[place]
            elif (other := ruled.get(id(tensor))) is not None and all(rank[other] == rank[place] for rank in ranks):
                layout = self._ruled[other]  # the same tensor, in which nothing was added up meanwhile
            else:
                layout = None if _same([rank.get(place) for rank in ranks]) else Unknown()
            if layout is not None:
                event, path = place
                layouts[event] = {**layouts.at(event), path: layout}
        return layouts


NO_RULE = Unknown()
Rule = Callable[[int, Path, torch.Tensor], Layout | None]
"""The layout of a tensor of a value, by its number and path in it: None if whole, `NO_RULE` if it is not known."""


class Rules:
    """What the layers say about what they take and return."""

    def __init__(self, modules: Mapping[str, torch.nn.Module], kv_heads: int, ranks: int) -> None:
        self._modules = modules
        self._copies = max(ranks // kv_heads, 1)

    def of(self, path: str, kind: Kind) -> Rule:
        """The rule for the values of `kind` of a module."""
        module: Any = self._modules[path]
        layer = getattr(module, "base_layer", module) if type(module).__name__.endswith("LoRA") else module
        names = {cls.__name__ for cls in type(layer).__mro__}
        parent, _, name = path.rpartition(".")
        attention = self._attention_in(parent)
        if "RowParallelLinear" in names:
            return _row(layer, kind)
        if "ColumnParallelLinear" in names:
            return _column(layer, kind)
        if "Attention" in names:
            return self._attention(kind)
        if not names.isdisjoint(EXPERTS):
            return _experts(layer, kind, names)
        if attention is not None and any(each.endswith("RotaryEmbedding") for each in names):
            return self._rotary(kind)
        if attention is not None and name in QUERY_KEY:
            return self._head_norm(attention, keys=QUERY_KEY[name])
        return _none

    def is_attention(self, path: str) -> bool:
        """Whether the module there is an attention layer, which computes nothing in a pass over no request."""
        return _is_attention(self._modules[path])

    def _attention_in(self, parent: str) -> Any:
        return next((child for child in self._modules[parent].children() if _is_attention(child)), None)

    def _attention(self, kind: Kind) -> Rule:
        def rule(number: int, path: Path, tensor: torch.Tensor) -> Layout | None:
            if kind == "output":
                return _by_heads(tensor)
            keys = path in ((0, 1), (0, 2), (1, "key"), (1, "value"))
            queries = path in ((0, 0), (1, "query"))
            return _by_heads(tensor, self._copies if keys else 1) if keys or queries else NO_RULE

        return rule

    def _rotary(self, kind: Kind) -> Rule:
        def rule(number: int, path: Path, tensor: torch.Tensor) -> Layout | None:
            if kind == "inputs" and number == 0:  # the positions
                return None
            keys = number == (1 if kind == "output" else 2)
            return _by_heads(tensor, self._copies if keys else 1)

        return rule

    def _head_norm(self, attention: Any, *, keys: bool) -> Rule:
        heads = attention.num_kv_heads if keys else attention.num_heads
        copies = self._copies if keys else 1

        def rule(number: int, path: Path, tensor: torch.Tensor) -> Layout | None:
            width = tuple(tensor.shape[1:])
            if width in ((heads, attention.head_size), (heads * attention.head_size,)):
                return _by_heads(tensor, copies)
            return NO_RULE

        return rule


def _none(number: int, path: Path, tensor: torch.Tensor) -> Layout | None:
    return NO_RULE


def _row(layer: Any, kind: Kind) -> Rule:
    def rule(number: int, path: Path, tensor: torch.Tensor) -> Layout | None:
        if layer.tp_size == 1 or number > 0:
            return None
        if kind == "inputs":
            return Pieces.even(-1, tensor.shape[-1]) if layer.input_is_parallel else None
        return None if layer.reduce_results else Sum()

    return rule


def _column(layer: Any, kind: Kind) -> Rule:
    sizes = tuple(layer.output_partition_sizes)
    replicas = getattr(layer, "num_kv_head_replicas", 1)

    def rule(number: int, path: Path, tensor: torch.Tensor) -> Layout | None:
        if layer.tp_size == 1 or kind == "inputs" or layer.gather_output:
            return None
        if sum(sizes) != tensor.shape[-1] or (replicas > 1 and len(sizes) != 3):
            return Unknown()
        return Pieces(-1, sizes, (1, replicas, replicas) if len(sizes) == 3 else (1,) * len(sizes))

    return rule


def _experts(layer: Any, kind: Kind, names: set[str]) -> Rule:
    config = layer.moe if "FusedMoEMethodBase" in names else layer.moe_config
    apart = "MoERunner" not in names or config.skip_final_all_reduce
    kernel = getattr(layer, "moe_kernel", None)

    def rule(number: int, path: Path, tensor: torch.Tensor) -> Layout | None:
        reduced = kernel is not None and kernel.output_is_reduced()
        split = kind == "output" and apart and not reduced and max(config.tp_size, config.ep_size) > 1
        return Sum() if split else NO_RULE

    return rule


def _is_attention(module: torch.nn.Module) -> bool:
    return "Attention" in {cls.__name__ for cls in type(module).__mro__}


def _by_heads(tensor: torch.Tensor, copies: int = 1) -> Layout:
    """Heads lie in the last dimension, or in the one before it where each has a dimension of its own."""
    dim = -1 if tensor.ndim == 2 else -2
    return Pieces.even(dim, tensor.shape[dim], copies)


def _tensors(value: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(cast("list[Any]", value)):
            yield from _tensors(item, (*path, index))
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[Any, Any]", value).items():
            yield from _tensors(item, (*path, key))


def _figures(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().flatten().to(torch.float64)
    weights = torch.cos(torch.arange(flat.numel(), device=flat.device, dtype=torch.float64))
    return torch.stack([flat.sum(), flat.abs().sum(), (flat * weights).sum()])


def _same(prints: list[Print | None]) -> bool:
    first = prints[0]
    if first is None or any(each is None or each[0] != first[0] for each in prints):
        return False
    figures = torch.tensor([each[1] for each in prints if each is not None], dtype=torch.float64)
    return bool(torch.all((figures - figures[:1]).abs() <= 1e-3 * figures[:, 1:2] + 1e-9))


def called_modules(modules: Mapping[str, torch.nn.Module]) -> dict[tuple[str, str], str]:
    """By the path of a module and the name of an operation in its forward: the path of the module called there."""
    first: dict[int, str] = {}
    for path, module in modules.items():
        first.setdefault(id(module), path)
    called: dict[tuple[str, str], str] = {}
    for path, module in modules.items():
        try:
            function, owner, _ = reach(module.forward)
            operations = instrument(function).operations
        except UnreadableError:
            continue
        for name, operation in operations.items():
            callee = callee_of(operation.callee, function, owner)
            if id(callee) in first:
                called[path, name] = first[id(callee)]
    return called
