"""What a server's refusal is for the caller."""

from __future__ import annotations

from typing import cast

import httpx
import msgspec

from nnsight_async.errors import ServerError
from nnsight_async.runs.carried import known, named
from nnsight_async.serve import messages as m

LONGEST_REFUSAL = 1 << 16


async def start_of(answer: httpx.Response) -> bytes:
    """The beginning of its body, which may be anything."""
    found = bytearray()
    async for chunk in cast("httpx.AsyncByteStream", answer.stream):  # `aiter_raw` would close it, at its end
        found += chunk
        if len(found) > LONGEST_REFUSAL:
            break
    return bytes(found[:LONGEST_REFUSAL])


class _Refused(msgspec.Struct):
    error: m.Refusal


def refusal_of(status: int, content: bytes) -> BaseException:
    """What a local call would raise, where the answer says that; else a `ServerError` with its status."""
    try:
        refusal = msgspec.json.decode(content, type=_Refused).error
    except (msgspec.MsgspecError, RecursionError):
        refusal = m.Refusal("ServerError", f"the server answered {status}: {content[:200].decode(errors='replace')}")
    if status == 400 and refusal.kind != "ServerError" and any(name == refusal.kind for _, name in known()):
        return named(refusal.kind, refusal.message)
    if refusal.kind == "CaptureError":
        return named("CaptureError", refusal.message)
    error = ServerError(refusal.message)
    error.status = status
    return error
