from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nnsight_async.testing import hf_model
from nnsight_async.tree.record import record

IDS = torch.tensor([[1, 2, 3]])


def order_by_hooks(model: torch.nn.Module, *args: Any) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Torch's own account of the order, by forward hooks."""
    clock, entries, exits, handles = count(), {}, {}, []
    for path, module in model.named_modules():
        enter = lambda *_, path=path: entries.setdefault(path, []).append(next(clock))  # noqa: E731
        leave = lambda *_, path=path: exits.setdefault(path, []).append(next(clock))  # noqa: E731
        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    model(*args)
    for handle in handles:
        handle.remove()
    return {path: (tuple(entries[path]), tuple(exits[path])) for path in entries}


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
def test_order_is_that_of_torch_hooks(name: str) -> None:
    model = hf_model(name)

    calls = record(model, lambda: model(IDS))

    shared = {path for path in calls if path not in dict(model.named_modules())}
    assert {path: tuple(call) for path, call in calls.items() if path not in shared} == order_by_hooks(model, IDS)


TREES = st.recursive(st.just(None), lambda below: st.lists(below, min_size=1, max_size=3), max_leaves=12)


def built(shape: Any) -> torch.nn.Module:
    return torch.nn.Identity() if shape is None else torch.nn.Sequential(*map(built, shape))


@given(TREES)
@settings(deadline=None)
def test_order_of_any_tree_is_that_of_torch_hooks(shape: Any) -> None:
    model = built(shape)

    calls = record(model, lambda: model(torch.ones(1)))

    assert {path: tuple(call) for path, call in calls.items()} == order_by_hooks(model, torch.ones(1))


def test_a_module_whose_call_bypasses_hooks_is_seen(toy: Any) -> None:
    calls = record(toy, lambda: toy(IDS))

    assert "model" not in order_by_hooks(toy, IDS)
    assert calls["model"].entries == (1,)
    assert calls["model"].exits[0] < calls["lm_head"].entries[0]


def test_calls_of_a_shared_module_belong_to_the_parent_that_made_them(toy: Any) -> None:
    calls = record(toy, lambda: toy(IDS))

    every = [calls[f"model.layers.{index}.mlp"].exits[0] + 1 for index in range(3)]
    assert calls["model.layers.0.act"].entries == tuple(every)
    assert calls["model.layers.1.act"].entries == (every[1],)
    assert calls["model.layers.2.act"].entries == (every[2],)


def test_modules_that_are_not_called_are_absent(toy: Any) -> None:
    calls = record(toy, lambda: toy(IDS))

    assert "model.layers" not in calls
    assert "model.layers.0.unused" not in calls


def test_the_model_is_left_as_it_was_even_on_error(toy: Any) -> None:
    own = lambda x: x  # noqa: E731
    toy.lm_head.forward = own
    before = {path: dict(vars(module)) for path, module in toy.named_modules()}

    with pytest.raises(IndexError):
        record(toy, lambda: toy(torch.tensor([99])))
    record(toy, lambda: toy(IDS))

    assert {path: dict(vars(module)) for path, module in toy.named_modules()} == before
    assert toy.lm_head.forward is own


def test_the_result_of_the_forward_pass_is_unchanged(toy: Any) -> None:
    results: list[torch.Tensor] = []

    record(toy, lambda: results.append(toy(IDS)))

    assert torch.equal(results[0], toy(IDS))
