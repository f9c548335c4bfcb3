"""Rows of several runs, copied or written at once: a copy costs more than the few rows that it moves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from nnsight_async.interleave.rows import Span

SHORT = 8
"""Spans of up to this many rows are copied together."""

SCATTERED = 8
"""From this many places on, rows are looked up by their numbers."""

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
            joined = torch.cat(
                [tensor[start:stop] for start, stop in _ranges((span.start, span.stop) for span in short)]
            )
            pieces = torch.unsafe_split_with_sizes(joined, [span.rows for span in short])
            found.update(zip((span.start for span in short), pieces, strict=True))
    return found


class Places:
    """Where the rows of several runs lie that have as many each: `starts` are their first rows, ascending."""

    def __init__(self, starts: Sequence[int], rows: int = 1) -> None:
        self.starts = starts
        self.rows = rows
        """Of each run."""
        self._ranges = _ranges([(start, start + rows) for start in starts])
        self._indices: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.starts)

    def gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of their rows `[runs, rows, ...]`."""
        if len(self._ranges) == 1:
            start, stop = self._ranges[0]
            found = tensor[start:stop].clone()
        elif len(self._ranges) < SCATTERED or self.rows > SHORT:
            found = torch.cat([tensor[start:stop] for start, stop in self._ranges])
        else:
            found = tensor.index_select(0, self._on(tensor.device))
        return found.view(len(self.starts), self.rows, *tensor.shape[1:])

    def _on(self, device: torch.device) -> torch.Tensor:
        """The numbers of all rows, on the device, without waiting for what it is at."""
        if self._indices is None or self._indices.device != device:
            rows = [row for start, stop in self._ranges for row in range(start, stop)]
            self._indices = torch.tensor(rows, pin_memory=device.type != "cpu").to(device, non_blocking=True)
        return self._indices


def _ranges(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ordered rows `[start, stop)`, with neighbours joined."""
    ranges: list[tuple[int, int]] = []
    for start, stop in spans:
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((start, stop))
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
