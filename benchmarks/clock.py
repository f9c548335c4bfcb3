"""When steps end in the worker, and how much later their tokens are with the caller.

Both are read from `time.monotonic`, which all processes of a host share.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Ended = tuple[list[int], list[float]]
"""A prompt, and the ends of the steps that its request had part in."""


class WorkerClock:
    """Methods for `collective_rpc`. vLLM mixes the class into the worker; it does nothing until it is started."""

    model_runner: Any

    def clock_start(self) -> None:
        """Begin to note the ends of steps."""
        self._clock = StepClock(self.model_runner)

    def clock_stop(self) -> list[Ended]:
        """End it; what has been noted."""
        self._clock.stop()
        return self._clock.ended


class StepClock:
    """Notes when a runner returns the tokens of a step, for every request in it."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._originals = {name: vars(runner).get(name) for name in ("execute_model", "sample_tokens")}
        self._prompts: dict[str, list[int]] = {}
        self._ends: dict[str, list[float]] = defaultdict(list)
        self._going: list[str] = []
        runner.execute_model = self._executed(runner.execute_model)
        runner.sample_tokens = self._sampled(runner.sample_tokens)

    @property
    def ended(self) -> list[Ended]:
        return [(prompt, self._ends[request]) for request, prompt in self._prompts.items()]

    def stop(self) -> None:
        """Leave the runner as it was."""
        for name, original in self._originals.items():
            if original is None:
                delattr(self._runner, name)
            else:
                setattr(self._runner, name, original)

    def _executed(self, execute_model: Callable[..., Any]) -> Callable[..., Any]:
        def executed(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            self._prompts.update((new.req_id, new.prompt_token_ids) for new in scheduled.scheduled_new_reqs)
            self._going = list(scheduled.num_scheduled_tokens)
            return execute_model(scheduled, *args, **kwargs)

        return executed

    def _sampled(self, sample_tokens: Callable[..., Any]) -> Callable[..., Any]:
        def sampled(*args: Any, **kwargs: Any) -> Any:
            output = sample_tokens(*args, **kwargs)
            now = time.monotonic()
            for request in self._going:
                self._ends[request].append(now)
            return output

        return sampled


def delays(prompts: Sequence[list[int]], arrivals: Sequence[list[float]], ended: Iterable[Ended]) -> list[float]:
    """Seconds from the end of a step to its token, for each token of requests with different prompts.

    vLLM may run a step past the last token.
    """
    ends = {tuple(prompt): times for prompt, times in ended}
    found: list[float] = []
    for prompt, came in zip(prompts, arrivals, strict=True):
        left = ends[tuple(prompt)]
        assert len(came) <= len(left) <= len(came) + 1, "a step was not noted"
        found += [late - early for late, early in zip(came, left, strict=False)]
    return found
