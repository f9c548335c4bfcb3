"""Applies declared operations to a layer's output: a kernel of Triton on CUDA, torch elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from nnsight_async.worker.op_tables import KINDS

if TYPE_CHECKING:
    from nnsight_async.worker.op_tables import Tables

Heads = torch.Tensor
"""A row of `Tables.heads`: that of a site."""

STEER, ABLATE, CLAMP, REPLACE = range(len(KINDS))


def change(tables: Tables, heads: Heads, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
    """Change the rows of `hidden`, or of the stream `hidden + residual`, in place.

    Of a pair, the residual is given the stream and the hidden state zeros, so that their sum is exact in any dtype, as
    where a block writes `resid_post`. The sum is rounded as the next layer would round it, the rest is in float32.
    """
    apply = _triton() if hidden.is_cuda else in_torch
    flat = _rows(hidden)
    rest = None if residual is None else _rows(residual)
    apply(tables, heads, flat, rest)
    for own, changed in ((hidden, flat), (residual, rest)):
        if own is not None and changed is not None and changed.data_ptr() != own.data_ptr():
            own.copy_(changed.view(own.shape))


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """`[rows, width]`, each row in one piece."""
    flat = tensor.flatten(0, -2)
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _triton() -> Callable[..., None]:
    from nnsight_async.worker.op_triton import in_triton

    return in_triton


def in_torch(tables: Tables, heads: Heads, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
    states = tables.slots[: hidden.shape[0]]
    rows = (states >= 0).nonzero().squeeze(1)
    node = heads[states[rows].long()].long()
    rows, node = rows[node >= 0], node[node >= 0]
    if not rows.numel():
        return
    stream = hidden[rows] if residual is None else (hidden[rows] + residual[rows])
    stream = stream.float()
    while bool((node >= 0).any()):
        stream = torch.where((node >= 0)[:, None], _after(tables, node.clamp(min=0), stream), stream)
        node = torch.where(node >= 0, tables.nodes[node.clamp(min=0), 2].long(), node)
    if residual is None:
        hidden[rows] = stream.to(hidden.dtype)
    else:
        residual[rows] = stream.to(residual.dtype)
        hidden[rows] = 0


def _after(tables: Tables, node: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
    kind, number, _ = (column[:, None] for column in tables.nodes[node].unbind(1))
    low, high = (column[:, None] for column in tables.numbers[node].unbind(1))
    vector = tables.vectors[number[:, 0].long()]
    along = (stream * vector).sum(1, keepdim=True)
    held = torch.minimum(torch.maximum(along, low), high) - along
    amount = torch.where(kind == STEER, low, torch.where(kind == ABLATE, -low * along, held))
    return torch.where(kind == REPLACE, vector, stream + amount * vector)
