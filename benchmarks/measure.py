"""The order of the measurements: columns take turns, so that a machine that slows down slows all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from benchmarks.columns import COLUMNS, EAGER, Column, EngineKind
from benchmarks.models import engine_arguments
from benchmarks.options import Options
from benchmarks.process import Subject

Say = Callable[[str], None]
QUIET = 1.0
"""Seconds between two engines."""


@dataclass(slots=True)
class Measured:
    """Everything that was measured, by column and number of requests."""

    columns: list[str]
    versions: dict[str, str] = field(default_factory=dict[str, str])
    cells: dict[tuple[str, int], list[dict[str, Any]]] = field(
        default_factory=dict[tuple[str, int], list[dict[str, Any]]]
    )
    profiles: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict[tuple[str, int], dict[str, Any]])


def measure(options: Options, columns: list[str], cuda: bool, say: Say) -> Measured:
    """Start the engines, run every cell `repeats` times in turns, end the engines."""
    measured = Measured(columns)
    wanted = [COLUMNS[name] for name in columns]
    with ExitStack() as stack:
        drivers = Drivers(_start(stack, wanted, options, cuda, say), options)
        measured.versions = drivers.versions
        for requests in options.requests:
            say(f"{requests} requests")
            for column in wanted:
                drivers.drive(column, requests)  # not counted: whatever is done for the first time
            for repeat in range(options.repeats):
                for column in _turn(wanted, repeat):
                    reply = drivers.drive(column, requests, latency=options.latency)
                    measured.cells.setdefault((column.name, requests), []).append(reply)
            if options.profile:
                for column in wanted:
                    measured.profiles[column.name, requests] = drivers.drive(column, requests, profile=True)
    return measured


class Drivers:
    """The engines, one of which is driven at a time."""

    def __init__(self, subjects: dict[str, Subject], options: Options) -> None:
        self._subjects = subjects
        self._options = options
        self._last: Subject | None = None

    @property
    def versions(self) -> dict[str, str]:
        return next(iter(self._subjects.values())).versions

    def drive(self, column: Column, requests: int, **more: Any) -> dict[str, Any]:
        """Run one cell. An engine that comes after another gets an uncounted pass first, when that one has gone quiet:
        for about a second such a pass takes several times as long."""
        subject, options = self._subjects[column.engine], self._options
        command = {"work": column.work, "requests": requests, "steps": options.steps, "prompt": options.prompt}
        if subject is not self._last:
            time.sleep(QUIET)
            subject.ask(command)
            self._last = subject
        return subject.ask({**command, **more})


def _start(stack: ExitStack, columns: Sequence[Column], options: Options, cuda: bool, say: Say) -> dict[str, Subject]:
    """Where there are many cores (CUDA), all start at once."""
    kinds = list(dict.fromkeys(column.engine for column in columns))

    def start(kind: EngineKind) -> Subject:
        say(f"starting the {kind} engine")
        return stack.enter_context(Subject(kind, _arguments(options, cuda, eager=kind in EAGER)))

    with ThreadPoolExecutor(len(kinds) if cuda else 1) as pool:
        return dict(zip(kinds, pool.map(start, kinds), strict=True))


def _turn(columns: Sequence[Column], repeat: int) -> Sequence[Column]:
    """Back and forth, so that no column always follows the same one."""
    return columns if repeat % 2 == 0 else columns[::-1]


def _arguments(options: Options, cuda: bool, *, eager: bool) -> dict[str, Any]:
    """The same engine for all columns, but for graphs."""
    most = max(options.requests)
    length = options.prompt + options.steps
    device: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_memory_bytes": 4 << 30, "gpu_memory_utilization": 0.12}
    if not cuda:
        device = {"dtype": "float32", "kv_cache_memory_bytes": 256 << 20}
    if not eager:
        sizes = sorted({2**power for power in range(9) if 2**power < most} | {most})
        device["compilation_config"] = {"cudagraph_capture_sizes": sizes}
    return {
        **engine_arguments(options.model),
        **device,
        **({"enforce_eager": True} if eager else {}),
        "distributed_executor_backend": "uni",
        "max_model_len": -(-length // 64) * 64,
        "max_num_seqs": most,
        "max_num_batched_tokens": max(most * options.prompt, length, 2048),
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "disable_log_stats": True,
    }
