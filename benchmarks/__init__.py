"""What the engine costs, beside plain vLLM: `python -m benchmarks`."""

from __future__ import annotations
