from __future__ import annotations

import pytest
import torch

from benchmarks.local import LAYERS, bare, hooked, measure, row, tiny, traced
from nnsight_async import TransformersModel


@pytest.fixture(scope="module")
def model():
    with TransformersModel(tiny()) as model:
        yield model


@pytest.mark.parametrize("reads", [1, LAYERS])
def test_a_trace_reads_what_hooks_keep(model, reads):
    kept, found = hooked(model.module)(reads), traced(model)(reads)
    assert len(found) == len(kept) == reads
    for one, other in zip(found, kept, strict=True):
        torch.testing.assert_close(one, other[0])


def test_what_is_measured_of_each(model):
    contenders = {"bare": bare(model.module), "hooks": hooked(model.module), "ours": traced(model)}
    found = measure(contenders, repeats=2, number=1)
    assert all(len(times) == 2 and min(times) > 0 for by_reads in found.values() for times in by_reads.values())


def test_a_row_holds_differences_of_the_fastest():
    found = {"hooks": {1: [0.002, 0.005], LAYERS: [0.003, 0.009]}, "ours": {1: [0.009, 0.003], LAYERS: [0.006, 0.1]}}
    assert row(found, "ours") == ["3.00", "ours", "6.00", "1.00", "200"]
    assert row(found, "hooks") == ["2.00", "hooks", "3.00", "", "67"]
