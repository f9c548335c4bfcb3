"""What travels to the worker inside a request: the block, the run's key, its limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

KEY = "nnsight_async"
"""Our entry in `SamplingParams.extra_args`, beside the user's own."""


class _Params(Protocol):
    extra_args: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Shipment:
    """A block on its way. vLLM carries `bytes` in `extra_args` whole (0.32, 0.33)."""

    run: int
    block: bytes
    budget: int
    timeout: float

    @classmethod
    def of(cls, params: _Params | None) -> Shipment | None:
        """The shipment of a request, if it has one."""
        packed = params.extra_args.get(KEY) if params is not None and params.extra_args else None
        return None if packed is None else cls(*packed)

    def onto(self, params: _Params) -> None:
        """Put the shipment on sampling parameters, beside what else is there."""
        params.extra_args = {**(params.extra_args or {}), KEY: [self.run, self.block, self.budget, self.timeout]}
