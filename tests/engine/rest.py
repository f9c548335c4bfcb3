"""An engine at which nothing is under way."""

from __future__ import annotations

import asyncio
from typing import Any

from nnsight_async.testing.engine import DRAINED_WITHIN, drained


async def at_rest(model: Any) -> dict[str, Any]:
    """What `drained` gives, when all that the worker has sent is there: also what it sent for runs that were left."""
    await drained(model)
    engine = model._engine
    inbox = engine._inbox

    async def mark_comes() -> None:
        number = inbox.next_mark
        await engine._ask("nnsight_mark", inbox.address, number)  # behind everything
        async with asyncio.timeout(DRAINED_WITHIN):
            while inbox._marked < number:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    await asyncio.wrap_future(engine.call(mark_comes()))
    return await drained(model)
