from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Block:
    """Intervention code ready to travel; `names` are the variables that it saves, in the order of the text."""

    payload: bytes
    names: tuple[str, ...]
    filename: str
    first_line: int
    function: str
