"""Names of the places in a forward pass where a value can be read or written."""

from __future__ import annotations

from typing import Literal, NamedTuple

RESERVED = frozenset({"output", "input", "inputs"})

Kind = Literal["output", "input", "inputs", "logits", "samples"]


class Location(NamedTuple):
    """A place in the forward pass: the `kind` of value at the module called `path`."""

    path: str
    kind: Kind

    def __str__(self) -> str:
        return f"{expression(self.path)}.{self.kind}"

    @property
    def in_model(self) -> bool:
        """Whether a module passes the value (else the runner does)."""
        return self.kind not in ("logits", "samples")

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
