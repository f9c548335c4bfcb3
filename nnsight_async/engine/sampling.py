"""Sampling parameters of a run, from keyword arguments."""

from __future__ import annotations

from typing import Any

from nnsight_async.engine.settings import check_names
from nnsight_async.errors import UnsupportedError

ALIASES = {"max_new_tokens": "max_tokens"}


def sampling_params(given: dict[str, Any], *, what: str = "trace()") -> Any:
    """vLLM's `SamplingParams`; `TypeError` for an unknown name, vLLM's own `ValueError` for a bad value."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    named = {ALIASES.get(name, name): value for name, value in given.items()}
    check_names(named, [*SamplingParams.__struct_fields__, *ALIASES], what)
    if named.get("n", 1) != 1:
        raise UnsupportedError("n > 1 is not supported yet: start one run per sequence")
    named["output_kind"] = RequestOutputKind.DELTA
    return SamplingParams(**named)
