"""What is asked of vLLM for one prompt."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnsight_async.runs.ops import Ops


@dataclass(slots=True)
class Request:
    """A prompt in one of vLLM's forms, its sampling parameters, and what else `AsyncLLM.generate` takes.

    `edits` chooses among those of the engine (None: all), `ops` are declared operations. `invoke` and `sequence` number
    it among those that belong together.
    """

    prompt: Any
    params: Any
    lora: Any = None
    edits: tuple[str, ...] | None = None
    priority: int = 0
    invoke: int = 0
    sequence: int = 0
    trace_headers: Mapping[str, str] | None = None
    ops: Ops = ()

    def on(self, prompt: Any) -> Request:
        """The same for another prompt."""
        return replace(self, prompt=prompt, params=copy(self.params))

    def sequences(self) -> list[Request]:
        """One request for each of the `n` sequences, with the seeds that vLLM (0.32, 0.33) gives: seed + number."""
        if self.params.n == 1:
            return [self]
        return [self._sequence(number) for number in range(self.params.n)]

    def _sequence(self, number: int) -> Request:
        one = replace(self.on(dict(self.prompt)), sequence=number)
        one.params.n = 1
        if one.params.seed is not None:
            one.params.seed += number
        return one
