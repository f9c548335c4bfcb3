"""Ranks that are threads, and the causal model of the simulation divided among them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any

import torch

from nnsight_async.interleave.ranks import Kind
from tests.worker.causal import HEADS, KV_HEADS, SIZE, WIDTH, Causal

PATIENCE = 120.0  # seconds


class Meeting:
    """Where the threads of a group exchange what they have, in the order in which they all come to it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=PATIENCE)
        self._brought: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._brought[rank] = value
        self._barrier.wait()
        brought = list(self._brought)
        self._barrier.wait()
        return brought


class ThreadRanks:
    """The `Ranks` of one thread."""

    def __init__(self, rank: int, meeting: Meeting, inboxes: Sequence[queue.SimpleQueue[Any]]) -> None:
        self.rank, self.size = rank, meeting.size
        self.meeting = meeting
        self._inboxes = inboxes

    @classmethod
    def group(cls, size: int) -> list[ThreadRanks]:
        meeting, inboxes = Meeting(size), [queue.SimpleQueue[Any]() for _ in range(size)]
        return [cls(rank, meeting, inboxes) for rank in range(size)]

    def tell(self, message: object) -> None:
        for inbox in self._inboxes[1:]:
            inbox.put(message)

    def hear(self) -> Any:
        return self._inboxes[self.rank].get(timeout=PATIENCE)

    def send(self, tensor: torch.Tensor) -> None:
        for inbox in self._inboxes[1:]:
            inbox.put(tensor.clone())

    def receive(self, kind: Kind) -> torch.Tensor:
        tensor = self.hear()
        assert Kind.of(tensor) == kind
        return tensor

    def part(self) -> None: ...
    def meet(self) -> None: ...

    def gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        parts = self.meeting.exchange(self.rank, tensor.clone())
        return parts if self.rank == 0 else ()

    def agree(self, failure: str | None) -> Sequence[str | None]:
        return self.meeting.exchange(self.rank, failure)

    def compare(self, found: Any) -> list[Any]:
        return self.meeting.exchange(self.rank, found)


# -- layers, named and described as vLLM's are -------------------------------------------------------------------------


class ColumnParallelLinear(torch.nn.Module):
    gather_output = False

    def __init__(self, whole: torch.nn.Linear, sizes: Sequence[int], ranks: ThreadRanks) -> None:
        super().__init__()
        self.tp_size = ranks.size
        self.output_partition_sizes = [size // ranks.size for size in sizes]
        self.output_size, self.output_size_per_partition = sum(sizes), sum(self.output_partition_sizes)
        pieces = [part.chunk(ranks.size)[ranks.rank] for part in whole.weight.split(list(sizes))]
        self.weight = torch.nn.Parameter(torch.cat(pieces))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight)


class QKVParallelLinear(ColumnParallelLinear):
    """Ranks beyond the heads of keys have the same ones."""

    def __init__(self, whole: torch.nn.Linear, ranks: ThreadRanks) -> None:
        replicas = max(ranks.size // KV_HEADS, 1)
        q, k, v = whole.weight.split([HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE])
        keys, values = (each.view(KV_HEADS, -1).repeat_interleave(replicas, 0) for each in (k, v))
        rows = torch.cat([q, keys.reshape(-1, WIDTH), values.reshape(-1, WIDTH)])
        kv_rows = KV_HEADS * replicas * SIZE
        repeated = torch.nn.Linear(WIDTH, len(rows), bias=False)
        repeated.weight = torch.nn.Parameter(rows)
        super().__init__(repeated, [HEADS * SIZE, kv_rows, kv_rows], ranks)
        self.num_kv_head_replicas, self.total_num_kv_heads, self.head_size = replicas, KV_HEADS, SIZE


class RowParallelLinear(torch.nn.Module):
    input_is_parallel = reduce_results = True

    def __init__(self, whole: torch.nn.Linear, ranks: ThreadRanks) -> None:
        super().__init__()
        self.tp_size, self.ranks = ranks.size, ranks
        self.input_size, self.input_size_per_partition = whole.in_features, whole.in_features // ranks.size
        self.weight = torch.nn.Parameter(whole.weight.chunk(ranks.size, 1)[ranks.rank].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mine = torch.nn.functional.linear(x, self.weight)
        return torch.stack(self.ranks.meeting.exchange(self.ranks.rank, mine)).sum(0)


class VocabularyRows(torch.nn.Module):
    """The LM head of one rank, applied by the logits processor."""

    def __init__(self, whole: torch.nn.Linear, ranks: ThreadRanks) -> None:
        super().__init__()
        self.ranks = ranks
        self.weight = torch.nn.Parameter(whole.weight.chunk(ranks.size)[ranks.rank].clone())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mine = torch.nn.functional.linear(hidden, self.weight)
        return torch.cat(self.ranks.meeting.exchange(self.ranks.rank, mine), -1)


def divided(model: Causal, ranks: ThreadRanks) -> Causal:
    """`model`, changed into what one rank has of it."""
    for layer in model.model.layers:
        attention: Any = layer.self_attn
        attention.qkv_proj = QKVParallelLinear(attention.qkv_proj, ranks)
        attention.o_proj = RowParallelLinear(attention.o_proj, ranks)
        attention.attn.num_heads, attention.attn.num_kv_heads = HEADS // ranks.size, max(KV_HEADS // ranks.size, 1)
        mlp: Any = layer.mlp
        mlp.up = ColumnParallelLinear(mlp.up, [2 * WIDTH], ranks)
        mlp.down = RowParallelLinear(mlp.down, ranks)
    model.lm_head = VocabularyRows(model.lm_head, ranks)
    return model.eval().requires_grad_(requires_grad=False)
