from __future__ import annotations

import pytest
import torch

from nnsight_async.interleave.layouts import Layouts, Pieces, Sum, Unknown, mapped
from nnsight_async.interleave.locations import Location

ROWS = 3


def test_gate_and_up_come_in_the_order_of_one_rank():
    gate, up = torch.arange(24.0).view(ROWS, 8), -torch.arange(24.0).view(ROWS, 8)
    ranks = [torch.cat([gate[:, 4 * rank :][:, :4], up[:, 4 * rank :][:, :4]], -1) for rank in range(2)]
    assert torch.equal(Pieces(-1, (4, 4), (1, 1)).whole(ranks), torch.cat([gate, up], -1))


@pytest.mark.parametrize(("ranks", "kv_heads"), [(2, 4), (2, 2), (2, 1), (4, 2), (4, 1)])
def test_heads_of_keys_that_several_ranks_have_come_once(ranks, kv_heads):
    q, k, v = torch.randn(ROWS, 8, 2), torch.randn(ROWS, kv_heads, 2), torch.randn(ROWS, kv_heads, 3)
    local, copies = max(kv_heads // ranks, 1), max(ranks // kv_heads, 1)
    layout = Pieces(-1, (16 // ranks, local * 2, local * 3), (1, copies, copies))
    parts: list[torch.Tensor] = []
    for rank in range(ranks):
        own = slice(rank // copies * local, rank // copies * local + local)
        each = q[:, rank * 8 // ranks :][:, : 8 // ranks], k[:, own], v[:, own]
        parts.append(torch.cat([heads.flatten(1) for heads in each], -1))
    whole = torch.cat([heads.flatten(1) for heads in (q, k, v)], -1)
    assert torch.equal(layout.whole(parts), whole)
    for rank, part in enumerate(parts):
        assert torch.equal(layout.part(whole, rank, ranks), part)


def test_heads_that_have_a_dimension_of_their_own():
    whole = torch.randn(ROWS, 4, 5)
    layout = Pieces.even(-2, 2)
    assert torch.equal(layout.part(whole, 1, 2), whole[:, 2:])
    assert torch.equal(layout.whole([whole[:, :2], whole[:, 2:]]), whole)


def test_what_is_written_to_a_sum_adds_up_to_it():
    parts, written = [torch.randn(ROWS, 4) for _ in range(3)], torch.randn(ROWS, 4)
    torch.testing.assert_close(Sum().whole(parts), parts[0] + parts[1] + parts[2])
    assert torch.equal(Sum().whole([Sum().part(written, rank, 3) for rank in range(3)]), written)


def test_only_tensors_at_the_paths_of_a_place_are_changed():
    args = (torch.ones(2), torch.ones(2)), {"residual": torch.ones(2), "flag": 3}
    place = {(0, 1): Sum(), (1, "residual"): Sum(), (0, 5): Sum(), (1, "flag"): Sum(), (1, "other", 0): Sum()}
    (first, second), named = mapped(args, place, lambda tensor, layout: tensor * 2)
    assert (first.sum(), second.sum(), named["residual"].sum(), named["flag"]) == (2, 4, 4, 3)
    assert args[0][1].sum() == 2


def test_arguments_by_name_and_by_position_are_the_same():
    layouts = Layouts()
    layouts[Location("mlp", "inputs")] = {(0, 0): Sum(), (1, "gate"): Unknown()}
    assert layouts.of_call("mlp", ["x", "gate"]).keys() == {(0, 0), (1, "x"), (1, "gate"), (0, 1)}


def test_an_operation_is_known_by_the_module_that_it_calls():
    layouts = Layouts()
    layouts[Location("act", "output")] = {(): Sum()}
    layouts.called["mlp", "act_0"] = "act"
    assert layouts.at(Location("mlp", "output", "act_0")) == {(): Sum()}
    assert layouts.known(Location("mlp", "output", "act_0"))
    assert not layouts.known(Location("mlp", "output", "silu_0"))
    assert layouts.known(Location("mlp", "output"))
