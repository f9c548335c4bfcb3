"""Host time of the parts of our client."""

from __future__ import annotations

from benchmarks.stopwatch import Stopwatch
from nnsight_async.engine import inbox
from nnsight_async.runs.run import Run


class ClientStopwatch:
    """Measures from its making to `stop`."""

    def __init__(self) -> None:
        self._watch = Stopwatch()
        self._watch.wrap(Run, "feed_output", "tokens in")
        self._watch.wrap(Run, "feed_frame", "frames in")
        self._watch.wrap(inbox.frames, "decode", "decode")

    def stop(self) -> None:
        self._watch.stop()

    @property
    def seconds(self) -> dict[str, float]:
        """CPU seconds by part."""
        return dict(self._watch.seconds)
