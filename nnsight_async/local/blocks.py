"""The blocks of runs, where the model is: loaded, and their frames brought home."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from nnsight_async.capture.load import load
from nnsight_async.interleave.block import BlockRun
from nnsight_async.interleave.lent import lend
from nnsight_async.interleave.tracer import Tracer
from nnsight_async.local.barrier import Meeting
from nnsight_async.local.home import Home
from nnsight_async.runs import reporting
from nnsight_async.tree.model import ModelView
from nnsight_async.tree.references import resolved

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nnsight_async.capture.block import Block
    from nnsight_async.capture.constants import Constant
    from nnsight_async.local.barrier import MeetingPlace
    from nnsight_async.runs.run import Run

IN_BLOCK = "{0} cannot be used in a block: it belongs around it"


class LocalView(ModelView):
    """The model as blocks see it."""

    _not_here = IN_BLOCK


class LocalTracer(Tracer):
    """The tracer as blocks see it."""

    _not_here = IN_BLOCK


class Blocks:
    """Loads the blocks of runs and passes on what they have to say."""

    def __init__(self, device: torch.device, save_bytes: int, block_seconds: float) -> None:
        self.interleaver: MeetingPlace
        self._device = device
        self._save_bytes = save_bytes
        self._block_seconds = block_seconds
        self._runs: dict[int, Run] = {}
        self._of: dict[BlockRun, int] = {}
        """The number of the edit that a block is of."""

    @property
    def runs(self) -> int:
        """How many have state here."""
        return len(self._runs)

    def arrive(self, run: Run, tokens: int, meetings: dict[str, Meeting]) -> list[BlockRun]:
        """The blocks of `run`, those of edits first. `meetings`: the barriers of its trace."""
        self._runs[run.key] = run
        blocks: list[BlockRun] = []
        for edit in run.edits:
            block = self._block(run, edit.block, tokens, len(blocks), meetings)
            self._of[block] = edit.number
            blocks.append(block)
        if run.block is not None:
            blocks.append(self._block(run, run.block, tokens, len(blocks), meetings))
        return blocks

    def check(self, block: Block) -> None:
        """Raise what loading a block does."""
        trial = BlockRun(0, self.interleaver, 0, timeout=self._block_seconds)
        trial.prepare(lambda: self._load(block, trial, {}))
        if trial.error is not None:
            raise trial.error

    def part(self, run: Run, blocks: Sequence[BlockRun]) -> None:
        """`run` has no more steps."""
        for block in blocks:
            self._of.pop(block, None)
            if not block.over:  # else it has told of it
                self.interleaver.end(block)
        self._runs.pop(run.key, None)

    def clear(self, numbers: Sequence[int]) -> None:
        """End the blocks of edits."""
        for block in [block for block, number in self._of.items() if number in numbers and not block.over]:
            self.interleaver.dismiss(block)

    def report(self, block: BlockRun) -> None:
        """Bring home what a block has to say at the end of a step."""
        frame = reporting.report(block, Home(may_change=block.saves.at_once))
        run = self._runs.get(block.key)
        if run is not None:
            run.feed_frame(frame)

    def _block(self, run: Run, block: Block, tokens: int, part: int, meetings: dict[str, Meeting]) -> BlockRun:
        made = BlockRun(run.key, self.interleaver, tokens, self._save_bytes, self._block_seconds, part=part)
        made.prepare(lambda: self._load(block, made, meetings))
        if made.error is None:
            made.look_ahead()
        else:
            self.report(made)
        return made

    def _load(self, block: Block, run: BlockRun, meetings: dict[str, Meeting]) -> Any:
        def resolve(reference: tuple[str, ...]) -> object:
            if reference[0] != "barrier":
                return resolved(reference, self.interleaver.model, run)
            _, number, parties = reference
            return meetings.setdefault(number, Meeting(int(parties), self.interleaver)).of(run)

        own = functools.partial(_own, {constant.digest: constant for constant in block.constants}, self._device)
        return load(block.payload, resolve, self._device if self._device.type != "cpu" else None, own)


def _own(constants: dict[bytes, Constant], device: torch.device, digest: bytes) -> torch.Tensor:
    """A constant for one run, whose block may change it."""
    return lend(constants[digest].content.to(device))
