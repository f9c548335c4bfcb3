"""Open up a running vLLM engine: read and edit activations at every decode step, and stream what you save."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnsight_async.errors import (
    AdapterError,
    BlockError,
    BlockTimeoutError,
    CaptureError,
    EngineClosedError,
    EngineDeadError,
    EngineStartError,
    GenerationEndedError,
    IsolationError,
    ItemError,
    LocationError,
    MainGuardError,
    NNsightError,
    NotAListError,
    NotASiteError,
    NotATapError,
    NotComputedError,
    NotSavedError,
    OpLimitError,
    OutOfOrderError,
    OutsideBlockError,
    RunCancelledError,
    SaveBudgetError,
    SaveError,
    ServerError,
    ShapeError,
    ShippingError,
    SlowConsumerError,
    SplitPromptError,
    StageError,
    SurfaceError,
    UnreadableError,
    UnsupportedError,
    ValuesLostError,
)
from nnsight_async.interleave.context import save

if TYPE_CHECKING:
    from nnsight_async.runs.saved import Saved
    from nnsight_async.runs.token import Token
    from nnsight_async.runs.window import MapResult
    from nnsight_async.transformers import TransformersModel
    from nnsight_async.vllm import VLLM

__all__ = [
    "VLLM",
    "AdapterError",
    "BlockError",
    "BlockTimeoutError",
    "CaptureError",
    "EngineClosedError",
    "EngineDeadError",
    "EngineStartError",
    "GenerationEndedError",
    "IsolationError",
    "ItemError",
    "LocationError",
    "MainGuardError",
    "MapResult",
    "NNsightError",
    "NotAListError",
    "NotASiteError",
    "NotATapError",
    "NotComputedError",
    "NotSavedError",
    "OpLimitError",
    "OutOfOrderError",
    "OutsideBlockError",
    "RunCancelledError",
    "SaveBudgetError",
    "SaveError",
    "Saved",
    "ServerError",
    "ShapeError",
    "ShippingError",
    "SlowConsumerError",
    "SplitPromptError",
    "StageError",
    "SurfaceError",
    "Token",
    "TransformersModel",
    "UnreadableError",
    "UnsupportedError",
    "ValuesLostError",
    "save",
]

# Loaded when first used: the worker and the tests of single packages need neither vLLM nor an event loop.
_LAZY = {
    "VLLM": "nnsight_async.vllm",
    "Saved": "nnsight_async.runs.saved",
    "Token": "nnsight_async.runs.token",
    "TransformersModel": "nnsight_async.transformers",
    "MapResult": "nnsight_async.runs.window",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
