"""Large tensors that blocks use, by content, for as long as the client says."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from nnsight_async.interleave.lent import lend


class Constants:
    """Flat tensors of bytes on the model's device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[bytes, torch.Tensor] = {}

    @property
    def count(self) -> int:
        return len(self._held)

    @property
    def bytes(self) -> int:
        return sum(content.numel() for content in self._held.values())

    def receive(self, digest: bytes, size: int, start: int, piece: bytes) -> None:
        """Take in a piece; the first one makes room for all."""
        if start == 0:
            self._held[digest] = torch.empty(size, dtype=torch.uint8, device=self._device)
        content = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
        self._held[digest][start : start + len(piece)] = content.to(self._device)

    def drop(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            self._held.pop(digest, None)

    def own(self, digest: bytes) -> torch.Tensor:
        """The content for one run, whose block may change it."""
        return lend(self._held[digest])
