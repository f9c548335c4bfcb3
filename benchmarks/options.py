"""The command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.columns import COLUMNS
from benchmarks.models import NAMES


@dataclass(frozen=True, slots=True)
class Options:
    model: str
    requests: list[int]
    steps: int
    prompt: int
    repeats: int
    columns: list[str] | None
    baseline: str
    profile: bool
    latency: bool
    json: Path | None


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Options from the command line; exits with a message for a bad one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.description = "Tokens per second and milliseconds per step of one engine with blocks, beside plain vLLM."
    parser.add_argument("--model", default="llama", help=f"a checkpoint, or one of {', '.join(NAMES)} (default: llama)")
    parser.add_argument("--requests", type=_numbers, default=[1, 8, 32], help="how many at once, e.g. 1,8,32,64,256")
    parser.add_argument("--steps", type=_positive, default=64, help="tokens that each request generates")
    parser.add_argument("--prompt", type=_positive, default=16, help="tokens of each prompt")
    parser.add_argument("--repeats", type=_positive, default=5, help="measurements of each cell, columns taking turns")
    parser.add_argument(
        "--columns", type=_columns, help=f"some of {','.join(COLUMNS)} (default: all that can run here)"
    )
    parser.add_argument("--baseline", default="plain", choices=COLUMNS, help="the column that the ratios are to")
    parser.add_argument("--profile", action="store_true", help="also say where host time goes, in an extra pass")
    parser.add_argument("--latency", action="store_true", help="also say how long tokens take from worker to caller")
    parser.add_argument("--json", type=Path, help="a file for everything that was measured")
    options = Options(**vars(parser.parse_args(arguments)))
    if options.columns is not None and options.baseline not in options.columns:
        options.columns.insert(0, options.baseline)
    return options


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _numbers(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _columns(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in COLUMNS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}")
    return names
