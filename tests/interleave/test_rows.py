from __future__ import annotations

import pytest
import torch

from nnsight_async.interleave.rows import Batch, Private, Slab, Span
from nnsight_async.interleave.together import SHORT

WIDTH = 4


def slab_of(tensor: torch.Tensor, *spans: Span) -> Slab:
    return Slab(tensor, Batch(tensor.shape[0], True), "here", spans)


def taken(slab: Slab, *spans: Span) -> list[Private]:
    with torch.inference_mode():
        return [slab.take(span) for span in spans]


@pytest.fixture
def batch() -> torch.Tensor:
    with torch.inference_mode():
        return torch.arange(24.0 * WIDTH).reshape(24, WIDTH)


def test_copies_made_together_hold_each_runs_own_rows(batch: torch.Tensor):
    spans = [Span(20, 21), Span(0, 2), Span(2, 3), Span(5, 5 + SHORT + 1)]  # any order, neighbours, gaps, a long one
    for span, private in zip(spans, taken(slab_of(batch, *spans), *spans), strict=True):
        assert torch.equal(private.value, batch[span.start : span.stop])


def test_copies_made_together_count_their_own_changes(batch: torch.Tensor):
    spans = [Span(0, 1), Span(1, 2), Span(2, 3)]
    before = batch.clone()
    first, second, third = taken(slab_of(batch, *spans), *spans)
    with torch.inference_mode():
        second.value += 1
    assert [private.changed() for private in (first, second, third)] == [False, True, False]
    assert torch.equal(first.value, before[:1])
    assert torch.equal(third.value, before[2:3])
    assert torch.equal(batch, before)


def test_what_one_run_writes_is_not_what_a_later_one_reads(batch: torch.Tensor):
    spans = [Span(0, 1), Span(1, 2)]
    slab = slab_of(batch, *spans)
    (first,) = taken(slab, spans[0])
    with torch.inference_mode():
        first.value.zero_()
        slab.put(0, slab.checked(spans[0], first.value, first))
    (second,) = taken(slab, spans[1])
    assert torch.equal(second.value, batch[1:2])
    assert torch.equal(slab.finish(), torch.cat([torch.zeros(1, WIDTH), batch[1:]]))


def test_a_tensor_that_stands_twice_is_handed_out_as_two_copies(batch: torch.Tensor):
    span = Span(0, 1)
    slab = Slab((batch, batch), Batch(24, True), "here", [span])
    (private,) = taken(slab, span)
    one, other = private.value
    with torch.inference_mode():
        one.zero_()
    assert torch.equal(other, batch[:1])


def test_what_several_runs_write_lands_in_their_rows(batch: torch.Tensor):
    before = batch.clone()
    spans = [Span(0, 1), Span(1, 3), Span(7, 8), Span(8, 9)]
    new = [
        torch.full((1, WIDTH), -1.0),
        torch.full((2, WIDTH), -2.0),
        torch.full((1, WIDTH), -3),
        torch.zeros(1, WIDTH),
    ]
    slab = slab_of(batch, *spans)
    with torch.inference_mode():
        for span, rows in zip(spans, new, strict=True):
            slab.put(span.start, slab.checked(span, rows, None))
        got = slab.finish()
    assert torch.equal(got, torch.cat([*new[:2], before[3:7], *new[2:], before[9:]]))
    assert torch.equal(batch, before)


def test_runs_that_write_with_different_dtypes(batch: torch.Tensor):
    spans = [Span(0, 1), Span(1, 2)]
    slab = slab_of(batch, *spans)
    with torch.inference_mode():
        slab.put(0, slab.checked(spans[0], torch.full((1, WIDTH), 7, dtype=torch.int32), None))
        slab.put(1, slab.checked(spans[1], torch.full((1, WIDTH), 0.1), None))
        got = slab.finish()
    assert got[:2, 0].tolist() == [7.0, pytest.approx(0.1)]
    assert got.dtype == torch.float32


@pytest.mark.parametrize("replayed", [False, True], ids=["one after the other", "computed again"])
def test_what_is_written_in_place_after_a_replacement_reaches_what_was_passed_and_what_goes_on(batch, replayed):
    span, before, slab = Span(3, 5), batch.clone(), slab_of(batch, Span(3, 5))
    with torch.inference_mode():
        slab.put(span.start, [((), torch.full((2, WIDTH), -1.0))])
        if not replayed:
            value = slab.finish()
            slab = Slab(value, slab.batch, "here", [span], before=slab)
            assert torch.equal(slab.take(span).value, torch.full((2, WIDTH), -1.0))
        slab.put(span.start, [((), torch.full((2, WIDTH), -2.0))], in_place=True)
        value = slab.finish()
    for tensor in (batch, value):
        assert torch.equal(tensor[3:5], torch.full((2, WIDTH), -2.0))
        assert torch.equal(tensor[:3], before[:3])
        assert torch.equal(tensor[5:], before[5:])
