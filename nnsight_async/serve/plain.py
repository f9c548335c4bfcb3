"""Runs as JSON: for `curl`, the page at `/`, and clients in other languages.

The body of a request is a `PlainRun`; the answer are server-sent events, one for each token with what its step saved.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping
from typing import Any, cast

import msgspec
import torch

from nnsight_async.errors import NNsightError
from nnsight_async.runs.run import Run
from nnsight_async.runs.stream import Stream
from nnsight_async.runs.token import Token
from nnsight_async.serve import messages as m
from nnsight_async.serve import operations as ops

LONGEST = 1 << 20
"""Bytes of a request as JSON, which everybody's tokens wait for while it is read."""
MOST = 1 << 20
"""Numbers of one event, likewise."""


class PlainRun(msgspec.Struct, forbid_unknown_fields=True):
    """A run. In its statements a list of numbers stands for a tensor of float32."""

    prompt: str | list[m.Token]
    sampling: m.Sampling = {}
    statements: list[ops.Statement] = []
    edits: m.Names | None = None


runs = msgspec.json.Decoder(PlainRun)


def opened(body: bytes) -> PlainRun:
    """A request; `ValueError` for what is none."""
    try:
        asked = runs.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise ValueError(f"a malformed request: {error}") from None
    for node in ops.nodes(asked.statements):
        if isinstance(node, ops.Value):
            node.value = _tensor(node.value) if isinstance(node.value, list) else node.value
            if not isinstance(node.value, (torch.Tensor, str, int, float, bool, type(None))):
                raise ValueError("a malformed request: a value is a number, a text, or a list of numbers")
    return asked


async def events(run: Run, beat: float) -> AsyncGenerator[bytes]:
    """The tokens of a run, and at the end what it has saved, or its error."""
    stream = Stream(run)
    following: asyncio.Future[Token | None] | None = None
    try:
        while True:
            following = asyncio.ensure_future(anext(stream, None))
            while not (await asyncio.wait({following}, timeout=beat))[0]:
                yield b": alive\n\n"
            token = following.result()
            if token is None:
                break
            yield _event(_told(token))
        yield _event({"saves": saved(run.values)})
    except Exception as error:
        kind = type(error).__name__ if isinstance(error, NNsightError) else _built_in(error)
        yield _event({"error": {"kind": kind, "message": str(error)}})
    finally:
        if following is not None:
            following.cancel()
        run.hear()
        await stream.aclose()


def told(value: Any) -> Any:
    """A value as JSON has it: a tensor as lists of numbers."""
    if isinstance(value, torch.Tensor):
        plain = torch.view_as_real(value) if value.is_complex() else value
        return (plain.float() if plain.is_floating_point() else plain).tolist()
    if isinstance(value, (list, tuple)):
        return [told(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {str(key): told(item) for key, item in cast("dict[Any, Any]", value).items()}
    return value


def _told(token: Token) -> dict[str, Any]:
    return {
        "id": token.id, "text": token.text, "index": token.index, "logprob": token.logprob,
        "saves": saved(token.saves), "finish_reason": token.finish_reason,
    }  # fmt: skip


def saved(saves: Mapping[str, Any]) -> dict[str, Any]:
    """Values by their names; `ValueError` for more of them than JSON is for."""
    numbers = sum(map(_count, saves.values()))
    if numbers > MOST:
        raise ValueError(f"saved values of {numbers:,} numbers; as JSON at most {MOST:,} are sent at a time")
    return {name: told(value) for name, value in saves.items()}


def _count(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return max(value.numel(), math.prod(max(size, 1) for size in value.shape))
    if isinstance(value, dict):
        return sum(map(_count, cast("dict[Any, Any]", value).values()))
    return sum(map(_count, cast("list[Any]", value))) if isinstance(value, (list, tuple)) else 1


def _event(content: Any) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def _tensor(items: list[Any]) -> torch.Tensor:
    try:
        return torch.tensor(items, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"a malformed request: a list that is no tensor: {error}") from None


def _built_in(error: Exception) -> str:
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
