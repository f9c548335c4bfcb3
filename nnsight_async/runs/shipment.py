"""What travels to the worker inside a request: the block, the edits that it runs, the run's key, its limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from nnsight_async.runs.ops import ShippedOps

KEY = "nnsight_async"
"""Our entry in `SamplingParams.extra_args`, beside the user's own."""


class _Params(Protocol):
    extra_args: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Shipment:
    """A block on its way, or the numbers of edits alone, as `bytes`: vLLM copies all else there part by part (0.33).

    vLLM makes as many requests of it as it has `runs`, the keys of the runs in their order. `adapter`: the request has
    a LoRA adapter, and the run is to be told whether it could be loaded.
    """

    runs: tuple[int, ...]
    block: bytes | None
    budget: int
    timeout: float
    edits: tuple[int, ...] = ()
    adapter: bool = False
    ops: ShippedOps | None = None

    @classmethod
    def of(cls, params: _Params | None) -> Shipment | None:
        """The shipment of a request, if it has one."""
        packed = params.extra_args.get(KEY) if params is not None and params.extra_args else None
        if packed is None:
            return None
        runs, block, budget, timeout, edits, adapter, ops = msgspec.msgpack.decode(packed)
        shipped = None if ops is None else ShippedOps(*ops)
        return cls(tuple(runs), block, budget, timeout, tuple(edits), adapter, shipped)

    def onto(self, params: _Params) -> None:
        """Put the shipment on sampling parameters, beside what else is there."""
        packed = [self.runs, self.block, self.budget, self.timeout, self.edits, self.adapter, self.ops]
        params.extra_args = {**(params.extra_args or {}), KEY: msgspec.msgpack.encode(packed)}
