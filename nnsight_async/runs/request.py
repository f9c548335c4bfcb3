"""What is asked of vLLM for one run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Request:
    """A prompt in one of vLLM's forms, its sampling parameters, and what else `AsyncLLM.generate` takes."""

    prompt: Any
    params: Any
    lora: Any = None
    priority: int = 0
