"""Blocks on a model without weights: shapes and types of everything, and nothing is computed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from nnsight_async.local.engine import LocalEngine

if TYPE_CHECKING:
    from nnsight_async.runs.job import Job


class Scanner:
    """Starts runs on a model on the device "meta", which is made for the first of them."""

    def __init__(self, make: Callable[[], LocalEngine], owners: Callable[[], Sequence[object]]) -> None:
        self.owners = owners
        self._make = make
        self._making = threading.Lock()
        self._engine: LocalEngine | None = None

    def launch(self, job: Job) -> None:
        """Start a run."""
        with self._making:
            if self._engine is None:
                self._engine = self._make()
        self._engine.submit(list(job.runs()))

    async def alaunch(self, job: Job) -> None:
        """`launch`, without blocking the event loop."""
        await asyncio.to_thread(self.launch, job)

    def close(self) -> None:
        """End its thread."""
        with self._making:
            if self._engine is not None:
                self._engine.close()
