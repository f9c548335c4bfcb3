"""Open up a running vLLM engine: read and edit activations at every decode step, and stream what you save."""

from __future__ import annotations

from nnsight_async.interleave.context import save

__all__ = ["save"]
