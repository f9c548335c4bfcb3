"""What the forward passes are run by, as far as the interleaver has to know."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from nnsight_async.interleave.rows import Slab
from nnsight_async.interleave.tracer import Tracer
from nnsight_async.interleave.watchdog import Watchdog


class Setting(NamedTuple):
    """That of a worker of vLLM, unless it says otherwise."""

    slab: Callable[..., Slab] = Slab
    """How the rows of a run lie in a value."""
    tracer: type[Tracer] = Tracer
    """What blocks see as their tracer."""
    watchdog: type[Watchdog] = Watchdog
    """What ends a block that does not come back."""
    preempts: bool = True
    """Whether requests may be computed again, so that what blocks wrote has to be kept."""
    own_process: bool = True
    """Whether nobody else prints in this process while a block has its turn: then all of it is the block's."""
