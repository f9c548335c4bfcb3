"""The columns of the table: which engine they need, and what its requests do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EngineKind = Literal["plain", "graphs", "ours", "stepwise", "tap", "taps", "ops"]
Work = Literal[
    "plain", "idle", "one", "every", "edit", "python-one", "python-every", "python-edit",
    "ops-one", "ops-distinct", "ops-every",
]  # fmt: skip
"""Those of `python-` say the same in a way that only running the block can tell (`capture/plain.py`). Those of `ops-`
are declared operations, without a block."""


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
        Column("one-python", "ours", "python-one", "`one`, by a block that has to run for each request"),
        Column("every-python", "ours", "python-every", "`every`, by such a block"),
        Column("graphs-idle", "stepwise", "idle", "our engine with graphs (`enforce_eager=False`), without a block"),
        Column("graphs-one", "stepwise", "one", "`one` on it: steps with blocks call every module"),
        Column("tap-idle", "tap", "idle", "our engine with one tap, requests without a block"),
        Column("tap-one", "tap", "one", "`one` on it"),
        Column("tap-python", "tap", "python-one", "`one-python` on it"),
        Column("tap-edit", "tap", "edit", "every request adds to the output of that layer at every step"),
        Column("taps-one", "taps", "one", "`one` on an engine with a tap at every layer"),
        Column("taps-every", "taps", "every", "`every` on it"),
        Column("steer", "ours", "ops-one", "declared steering of one layer with one vector, every module called"),
        Column("ops-idle", "ops", "idle", "our engine with graphs and operations declared at every layer, unused"),
        Column("ops-steer", "ops", "ops-one", "every request steers one layer with the same vector"),
        Column("ops-distinct", "ops", "ops-distinct", "every request steers that layer with a vector of its own"),
        Column("ops-every", "ops", "ops-every", "every request steers every layer with the same vector"),
    )
}
EAGER: frozenset[EngineKind] = frozenset({"plain", "ours"})
"""The engines that call every module in every step."""


def default_columns(cuda: bool) -> list[str]:
    """All columns that the machine can run: without CUDA there are no graphs."""
    return [name for name, column in COLUMNS.items() if cuda or column.engine in EAGER]
