"""What is asked of a run beside its prompt, from keyword arguments."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import msgspec

from nnsight_async.engine.settings import check_names
from nnsight_async.runs.keywords import ALIASES, named
from nnsight_async.runs.ops import ops_of
from nnsight_async.runs.request import Request

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

OBJECTS = ("extra_args", "output_kind", "prompt_logprob_token_ids", "repetition_detection", "structured_outputs")


def settings(given: Mapping[str, Any], what: str) -> Request:
    """A request without a prompt, from the keywords of `trace` and the like; raises as `sampling_params` does."""
    sampling = dict(given)
    lora, priority = sampling.pop("lora_request", None), sampling.pop("priority", 0)
    if not isinstance(priority, int) or abs(priority) >> 63:  # at which vLLM does not look, as in `_check_types`
        raise TypeError(f"{what} got priority={priority!r}: a whole number of at most 63 bits is expected")
    edits = edit_names(sampling.pop("edits", None))
    ops = ops_of(sampling.pop("ops", None), what)
    return Request(None, sampling_params(sampling, what=what), lora, edits, priority, ops=ops)


def edit_names(edits: Any) -> tuple[str, ...] | None:
    """The names in `edits=[...]`; `TypeError` for what holds anything else."""
    if edits is None:
        return None
    if isinstance(edits, (list, tuple, set, frozenset)):
        names = tuple(cast("Iterable[Any]", edits))
        if all(isinstance(name, str) for name in names):
            return names
    raise TypeError(f"edits={edits!r}: a list of the names of edits is expected, such as edits=['calmer']")


def sampling_params(given: Mapping[str, Any], *, what: str = "trace()") -> Any:
    """vLLM's `SamplingParams`; `TypeError` for an unknown name, `ValueError` with vLLM's message for a bad value."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    own = named(given, what)
    check_names(own, [*SamplingParams.__struct_fields__, *ALIASES], what)
    own["output_kind"] = RequestOutputKind.DELTA
    with refusals():
        try:
            params = SamplingParams(**own)
        except (AssertionError, AttributeError, TypeError) as error:  # it computes with values before it looks at them
            raise TypeError(f"{what} got {_unlike(_kinds(SamplingParams), own)}") from error
    _check_types(params, own, what)
    return params


@contextmanager
def refusals() -> Generator[None]:
    """What vLLM refuses is raised as a `ValueError`, which its own class for that is no more (0.32)."""
    from vllm.exceptions import VLLMClientError

    try:
        yield
    except VLLMClientError as error:
        raise error if isinstance(error, ValueError) else ValueError(str(error)) from None


@cache
def _kinds(params: type[msgspec.Struct]) -> dict[str, Any]:
    """The types of its fields; kept, because looking them up takes several times as long as the rest (msgspec 0.23)."""
    return {field.name: field.type for field in msgspec.structs.fields(params)}


def _check_types(params: msgspec.Struct, given: Mapping[str, Any], what: str) -> None:
    """Raise `TypeError` where vLLM (0.32, 0.33) does not look, and its engine would end decoding the request."""
    for name in given.keys() - OBJECTS:
        if (why := _mistyped(params, name)) is not None:
            raise TypeError(f"{what} got {name}={given[name]!r}: {why}")


def mistake(params: msgspec.Struct) -> str | None:
    """What is wrong with the types of parameters that somebody else has made."""
    names = [name for name in _kinds(type(params)) if name not in OBJECTS]
    found = ((name, _mistyped(params, name)) for name in names)
    return next((f"{name}={getattr(params, name)!r}: {why}" for name, why in found if why is not None), None)


def _unlike(kinds: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """The first of some values that has not its type."""
    for name, value in given.items():
        if name in OBJECTS:
            continue
        try:
            msgspec.convert(value, kinds[name])
        except msgspec.ValidationError as error:
            return f"{name}={value!r}: {error}"
    return f"what vLLM does not take: {', '.join(given)}"


def _mistyped(params: msgspec.Struct, name: str) -> str | None:
    value = getattr(params, name)
    try:
        msgspec.convert(value, _kinds(type(params))[name])
        msgspec.msgpack.encode(value)
    except msgspec.ValidationError as error:
        return str(error)
    except (OverflowError, UnicodeError) as error:  # numbers of more than 64 bits, halves of surrogate pairs
        return f"it cannot be sent: {error}"
    return None
