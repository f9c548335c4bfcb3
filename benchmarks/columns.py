"""The columns of the table: which engine they need, and what its requests do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EngineKind = Literal["plain", "graphs", "ours"]
Work = Literal["plain", "idle", "one", "every", "edit"]


@dataclass(frozen=True, slots=True)
class Column:
    """One way to run the same requests."""

    name: str
    engine: EngineKind
    work: Work
    meaning: str


COLUMNS = {
    column.name: column
    for column in (
        Column("plain", "plain", "plain", "plain vLLM: AsyncLLM with vLLM's own worker, eager"),
        Column("graphs", "graphs", "plain", "plain vLLM with its default compilation and CUDA graphs"),
        Column("idle", "ours", "idle", "our engine and worker, requests without a block"),
        Column("one", "ours", "one", "every request reads and saves the output of one layer at every step"),
        Column("every", "ours", "every", "every request reads and saves the output of every layer at every step"),
    )
}
BASELINE = "plain"


def default_columns(cuda: bool) -> list[str]:
    """All columns that the machine can run: without CUDA there are no graphs."""
    return [name for name in COLUMNS if cuda or name != "graphs"]
