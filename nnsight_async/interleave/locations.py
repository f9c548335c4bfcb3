"""Names of the places in a forward pass where a value can be read or written."""

from __future__ import annotations

from typing import Literal, NamedTuple

RESERVED = frozenset({"output", "input", "inputs", "source"})

Kind = Literal["output", "input", "inputs", "logits", "samples"]


OUTSIDE = frozenset({"logits", "samples"})
"""Kinds of values that no module passes, but the runner."""


class Location(NamedTuple):
    """A place in the forward pass: the `kind` of value at the module called `path`.

    With an `operation`, the value is that of a call inside the module's forward: `attn_0`, or `attn_0/softmax_0` for a
    call inside the function that `attn_0` calls.
    """

    path: str
    kind: Kind
    operation: str = ""

    def __str__(self) -> str:
        return ".".join([expression(self.path), *self._inside(), self.kind])

    def _inside(self) -> list[str]:
        return [f"source.{name}" for name in self.operation.split("/")] if self.operation else []

    @property
    def in_model(self) -> bool:
        """Whether a module passes the value (else the runner does)."""
        return self.kind not in OUTSIDE

    @property
    def at_entry(self) -> bool:
        """Whether the value passes when the module is entered (else when it returns)."""
        return self.kind in ("input", "inputs")


LOGITS = Location("", "logits")
SAMPLES = Location("", "samples")


def expression(path: str, root: str = "model") -> str:
    """What to write for `path`: `model.model.layers[3].mlp`, where `root` is the variable that holds the model."""
    return root + "".join(_access(part) for part in path.split(".")) if path else root


def _access(part: str) -> str:
    if part.isdecimal():
        return f"[{part}]"
    if part.isidentifier() and part not in RESERVED:
        return f".{part}"
    return f'["{part}"]'
