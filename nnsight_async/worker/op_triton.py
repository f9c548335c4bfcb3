"""The kernel of declared operations, in Triton: one program for each row, which ends at once where there is nothing."""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# Triton reads the annotations of a kernel, and takes none but its own.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

    from nnsight_async.worker.op_tables import Tables

WIDE = 4096
"""From this width on, a row is worked on by more threads."""


@triton.jit(do_not_specialize=["rows"])
def _change(
    hidden,
    residual,
    slots,
    heads,
    nodes,
    numbers,
    vectors,
    rows,
    hidden_stride,
    residual_stride,
    width,
    pair: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0)
    node = tl.full((), -1, tl.int32)
    if row < rows:
        state = tl.load(slots + row)
        if state >= 0:
            node = tl.load(heads + state)
    if node >= 0:
        columns = tl.arange(0, block)
        inside = columns < width
        at = hidden + row.to(tl.int64) * hidden_stride + columns
        stored = tl.load(at, mask=inside, other=0.0)
        stream = stored.to(tl.float32)
        if pair:
            at = residual + row.to(tl.int64) * residual_stride + columns
            other = tl.load(at, mask=inside, other=0.0)
            stream = (stream + other.to(tl.float32)).to(other.dtype).to(tl.float32)
        while node >= 0:
            kind = tl.load(nodes + node * 3)
            number = tl.load(nodes + node * 3 + 1)
            low = tl.load(numbers + node * 2)
            high = tl.load(numbers + node * 2 + 1)
            vector = tl.load(vectors + number.to(tl.int64) * width + columns, mask=inside, other=0.0)
            along = tl.sum(stream * vector, axis=0)
            held = tl.minimum(tl.maximum(along, low), high) - along
            amount = tl.where(kind == 0, low, tl.where(kind == 1, -low * along, held))
            stream = tl.where(kind == 3, vector, stream + amount * vector)
            node = tl.load(nodes + node * 3 + 2)
        if pair:
            tl.store(at, stream.to(residual.dtype.element_ty), mask=inside)
            at = hidden + row.to(tl.int64) * hidden_stride + columns
            tl.store(at, tl.zeros((block,), hidden.dtype.element_ty), mask=inside)
        else:
            tl.store(at, stream.to(hidden.dtype.element_ty), mask=inside)


def in_triton(tables: Tables, heads: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
    rows, width = hidden.shape
    second = hidden if residual is None else residual
    launch: Any = _change[(rows,)]  # pyright: ignore[reportIndexIssue]
    launch(
        hidden,
        second,
        tables.slots,
        heads,
        tables.nodes,
        tables.numbers,
        tables.vectors,
        min(rows, tables.sizes.rows),
        hidden.stride(0),
        second.stride(0),
        width,
        pair=residual is not None,
        block=triton.next_power_of_2(width),
        num_warps=8 if width >= WIDE else 4,
        enable_fp_fusion=False,  # a product is rounded before it is added, as torch does it
    )
