from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nnsight_async.capture.constants import Constant


@dataclass(frozen=True, slots=True)
class Block:
    """Intervention code ready to travel; `names` are the variables that it saves, in the order of the text.

    `payload` names its large `constants` by their content: they travel apart.
    """

    payload: bytes
    names: tuple[str, ...]
    filename: str
    first_line: int
    function: str
    constants: tuple[Constant, ...] = ()
