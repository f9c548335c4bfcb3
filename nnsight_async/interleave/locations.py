"""Names of the places in a forward pass where a value can be read or written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["output", "input", "inputs", "logits", "samples"]


@dataclass(frozen=True, slots=True)
class Location:
    """A place in the forward pass: the `kind` of value at the module called `path`."""

    path: str
    kind: Kind

    def __str__(self) -> str:
        return f"{self.path}.{self.kind}" if self.path else self.kind

    @property
    def at_entry(self) -> bool:
        """Whether the value passes when the module is entered (else when it returns)."""
        return self.kind in ("input", "inputs")


LOGITS = Location("", "logits")
SAMPLES = Location("", "samples")
