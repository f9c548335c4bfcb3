"""Logits from which a token can be drawn, whatever a block has made of them."""

from __future__ import annotations

import pytest
import torch

from nnsight_async.worker.blocks import make_drawable, ranges

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_runs_that_wrote_are_made_finite_and_others_left(dtype: torch.dtype) -> None:
    before = torch.tensor([[NAN, INF, 1.0], [NAN, NAN, NAN], [NAN, INF, 2.0], [-INF, 3.0, INF]], dtype=dtype)
    logits = before.clone()
    make_drawable(logits, [0, 1, 3])
    low, high = torch.finfo(dtype).min, torch.finfo(dtype).max
    assert logits[[0, 1, 3]].tolist() == [[low, high, 1.0], [low, low, low], [-INF, 3.0, high]]
    torch.testing.assert_close(logits[2], before[2], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("rows", "found"),
    [([], []), ([0], [(0, 1)]), ([0, 1, 2, 5, 7, 8], [(0, 3), (5, 6), (7, 9)])],
)
def test_ranges_of_rows(rows: list[int], found: list[tuple[int, int]]) -> None:
    assert list(ranges(rows)) == found
