"""Where the declared operations of requests act on an engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from nnsight_async.errors import NotASiteError
from nnsight_async.interleave.locations import expression
from nnsight_async.runs.ops import Op
from nnsight_async.tree.layers import declared

if TYPE_CHECKING:
    from nnsight_async.runs.ops import Capture
    from nnsight_async.tree.manifest import Manifest

MOST = 4
"""Places that an error names."""


class Sites:
    """The layers that `op_sites=` names; where that names none, all those of an engine that calls every module."""

    def __init__(self, patterns: Sequence[str], *, eager: bool) -> None:
        self._patterns = patterns
        self._everywhere = eager and not patterns
        self.paths: tuple[str, ...] = ()

    def resolve(self, manifest: Manifest) -> None:
        """The model is known."""
        self.paths = declared(self._patterns, manifest)

    def check(self, ops: Iterable[Op | Capture]) -> None:
        """Raise `NotASiteError` for an operation where none act."""
        for op in () if self._everywhere else ops:
            if isinstance(op, Op) and op.path not in self.paths:
                there = ", ".join(map(expression, self.paths[:MOST])) or "it has none"
                raise NotASiteError(
                    f"{expression(op.path)} is not one of this engine's op_sites ({there}); on an engine that replays "
                    f"graphs, layers where declared operations act are named when it is built: op_sites=[{op.path!r}]"
                )
