"""Sampling parameters of a run, from keyword arguments."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nnsight_async.engine.settings import check_names
from nnsight_async.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Generator

ALIASES = {"max_new_tokens": "max_tokens"}


def sampling_params(given: dict[str, Any], *, what: str = "trace()") -> Any:
    """vLLM's `SamplingParams`; `TypeError` for an unknown name, `ValueError` for a bad value."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    named = {ALIASES.get(name, name): value for name, value in given.items()}
    check_names(named, [*SamplingParams.__struct_fields__, *ALIASES], what)
    if named.get("n", 1) != 1:
        raise UnsupportedError("n > 1 is not supported yet: start one run per sequence")
    named["output_kind"] = RequestOutputKind.DELTA
    with refusals():
        return SamplingParams(**named)


@contextmanager
def refusals() -> Generator[None]:
    """What vLLM refuses is raised as a `ValueError`, which its own class for that is no more (0.32)."""
    from vllm.exceptions import VLLMClientError

    try:
        yield
    except VLLMClientError as error:
        raise error if isinstance(error, ValueError) else ValueError(str(error)) from None
