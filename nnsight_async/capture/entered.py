from __future__ import annotations

import dis
from typing import TYPE_CHECKING

from nnsight_async.capture.stop import ENTERING

if TYPE_CHECKING:
    from types import FrameType

_CACHE = dis.opmap["CACHE"]


def is_entered(frame: FrameType) -> bool:
    """Whether what the call returns that `frame` is making is the context manager of a `with`."""
    code = frame.f_code.co_code
    following = frame.f_lasti + 2
    while following < len(code) and code[following] == _CACHE:
        following += 2
    return following < len(code) and dis.opname[code[following]] in ENTERING
