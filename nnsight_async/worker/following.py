"""The blocks of requests on a rank that follows another one, where they run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nnsight_async.worker.blocks import Blocks, Edit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nnsight_async.interleave.block import BlockRun


class FollowingBlocks(Blocks):
    """Knows which requests have blocks, and loads none."""

    def install(self, number: int, edit: Edit, timeout: float) -> None:
        self._edits[number] = edit

    def receive(self, digest: bytes, size: int, start: int, piece: bytes) -> None:
        pass

    def _capture(self, run: BlockRun, captures: Sequence[tuple[str, str]]) -> None:
        pass

    def _begin(self, run: BlockRun, block: bytes | None) -> None:
        pass
