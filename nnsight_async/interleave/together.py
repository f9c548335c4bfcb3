"""Rows of several runs, copied or written at once: a copy costs more than the few rows that it moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from nnsight_async.interleave.rows import Span

SHORT = 8
"""Spans of up to this many rows are copied together."""

Write = tuple[int, torch.Tensor]
"""Rows, and the row of the batch that the first is written to."""


class Piece(NamedTuple):
    """What one run has of a tensor: its item at an index of the first axis."""

    whole: torch.Tensor
    number: int


def copies(tensor: torch.Tensor, spans: Sequence[Span]) -> dict[int, torch.Tensor]:
    """Copies of the rows of all spans, by their first row: one copy of what few rows they have together, then a split.

    `unsafe_split` makes tensors that share memory but, unlike views, each count their own changes (torch 2.13). Long
    spans are copied alone, so that who keeps one row does not keep the memory of another's prompt.
    """
    short = sorted(span for span in spans if span.rows <= SHORT)
    with torch.inference_mode(False):
        found = {span.start: tensor[span.start : span.stop].clone() for span in spans if span.rows > SHORT}
        if short:
            joined = torch.cat([tensor[start:stop] for start, stop in _ranges(short)])
            pieces = torch.unsafe_split_with_sizes(joined, [span.rows for span in short])
            found.update(zip((span.start for span in short), pieces, strict=True))
    return found


def gathered(tensor: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
    """A copy of the rows of ordered spans, one after the other."""
    ranges = _ranges(spans)
    if len(ranges) == 1:
        start, stop = ranges[0]
        return tensor[start:stop].clone()
    return torch.cat([tensor[start:stop] for start, stop in ranges])


def _ranges(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """The rows of ordered spans, with neighbours joined."""
    ranges: list[tuple[int, int]] = []
    for span in spans:
        if ranges and ranges[-1][1] == span.start:
            ranges[-1] = (ranges[-1][0], span.stop)
        else:
            ranges.append((span.start, span.stop))
    return ranges


def joined(writes: list[Write]) -> Iterator[Write]:
    """Writes with those to neighbouring rows made one: a copy costs more than the rows that it moves."""
    group: list[torch.Tensor] = []
    start = stop = 0
    for at, rows in writes:
        if group and (at != stop or rows.dtype != group[0].dtype or rows.device != group[0].device):
            yield start, _cat(group)
            group = []
        if not group:
            start = stop = at
        group.append(rows)
        stop += rows.shape[0]
    yield start, _cat(group)


def _cat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
