"""Tables of what was measured."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.columns import COLUMNS
from benchmarks.measure import Measured
from benchmarks.options import Options

Row = Sequence[str]


def machine(measured: Measured) -> str:
    """One line: hardware, versions, commit."""
    versions = measured.versions
    device = versions["device"]
    if device == "CPU":
        device = f"{_processor()}, {len(os.sched_getaffinity(0))} cores"
    software = f"vLLM {versions['vllm']}, torch {versions['torch']}, Python {platform.python_version()}"
    return f"{device}; {software}; commit {_commit()}"


def table(measured: Measured, options: Options) -> str:
    """Tokens per second as a ratio to the baseline, and milliseconds per step, by column and number of requests."""
    header = [
        "requests",
        "column",
        "tokens/s",
        f"of {options.baseline}",
        "ms per step",
        "spread",
        "us per request and step",
    ]
    rows = [
        _row(measured, name, requests, options.baseline) for requests in options.requests for name in measured.columns
    ]
    return markdown(header, rows)


def _row(measured: Measured, name: str, requests: int, baseline: str) -> Row:
    cells, base = measured.cells[name, requests], measured.cells[baseline, requests]
    speed, steps = _median(_speeds(cells)), [1e3 * cell["step"] for cell in cells]
    over = 1e3 * (_median(steps) - 1e3 * _median(cell["step"] for cell in base)) / requests
    return [
        str(requests),
        name,
        f"{speed:,.0f}",
        f"{speed / _median(_speeds(base)):.2f}",
        f"{_median(steps):.2f}",
        f"{min(steps):.2f} to {max(steps):.2f}",
        "" if name == baseline else f"{over:+.0f}",
    ]


def latency_table(measured: Measured, options: Options) -> str:
    """From the end of a step in the worker to its token with the caller, over all tokens of all repeats; and how much
    longer a token takes than the baseline's of the same turn: the median turn, the least and the most."""
    header = [
        "requests",
        "column",
        "median us",
        "99th percentile",
        f"over {options.baseline}",
        "added per token",
        "spread",
    ]
    rows = [
        _latency_row(measured, name, requests, options.baseline)
        for requests in options.requests
        for name in measured.columns
    ]
    return markdown(header, rows)


def _latency_row(measured: Measured, name: str, requests: int, baseline: str) -> Row:
    cells, base = measured.cells[name, requests], measured.cells[baseline, requests]
    delays = [1e6 * delay for cell in cells for delay in cell["delays"]]
    usual = _median(1e6 * delay for cell in base for delay in cell["delays"])
    added = [100 * (cell["step"] / other["step"] - 1) for cell, other in zip(cells, base, strict=True)]
    return [
        str(requests),
        name,
        f"{_median(delays):,.0f}",
        f"{statistics.quantiles(delays, n=100)[98]:,.0f}",
        "" if name == baseline else f"{_median(delays) - usual:+,.0f}",
        "" if name == baseline else f"{_median(added):+.1f} %",
        "" if name == baseline else f"{min(added):+.1f} to {max(added):+.1f}",
    ]


def profile_table(measured: Measured, options: Options) -> str:
    """CPU time of the parts of worker and client, in microseconds per request and step."""
    parts = list(dict.fromkeys(part for profile in measured.profiles.values() for part in _flat(profile)))
    rows: list[Row] = []
    for (name, requests), profile in measured.profiles.items():
        flat, share = _flat(profile), 1e6 / (requests * options.steps)
        rows.append([str(requests), name, *(f"{flat[part] * share:.1f}" if part in flat else "" for part in parts)])
    return markdown(["requests", "column", *parts], rows)


def _flat(profile: dict[str, Any]) -> dict[str, float]:
    """Seconds by part, the whole processes first."""
    whole = {f"{process} process": seconds for process, seconds in profile["cpu"].items()}
    worker: dict[str, float] = profile["worker"]
    inside = {"worker thread": sum(seconds for part, seconds in worker.items() if ":" not in part)} if worker else {}
    return {**whole, **inside, **worker, **{f"client: {part}": seconds for part, seconds in profile["client"].items()}}


def legend(measured: Measured) -> str:
    return "\n".join(f"- `{name}`: {COLUMNS[name].meaning}" for name in measured.columns)


def write_json(path: Path, measured: Measured, options: Options) -> None:
    """Every single measurement."""
    cells = [{"column": name, "requests": requests, "runs": runs} for (name, requests), runs in measured.cells.items()]
    profiles = [{"column": name, "requests": n, **profile} for (name, n), profile in measured.profiles.items()]
    content = {"machine": machine(measured), "options": asdict(options), "cells": cells, "profiles": profiles}
    path.write_text(json.dumps(content, indent=1, default=str) + "\n")


def markdown(header: Row, rows: Iterable[Row]) -> str:
    """A table whose second column is text and whose others are numbers."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(header))]
    texts = [f"| {' | '.join(map(_cell, line, widths, range(len(header))))} |" for line in lines]
    rule = "|" + "|".join("-" * (width + 1) + ("-" if at == 1 else ":") for at, width in enumerate(widths)) + "|"
    return "\n".join([texts[0], rule, *texts[1:]])


def _cell(text: str, width: int, at: int) -> str:
    return text.ljust(width) if at == 1 else text.rjust(width)


def _speeds(cells: Iterable[dict[str, Any]]) -> Iterable[float]:
    return (cell["tokens"] / cell["wall"] for cell in cells)


def _median(numbers: Iterable[float]) -> float:
    return statistics.median(numbers)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()
