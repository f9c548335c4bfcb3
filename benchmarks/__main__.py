"""`python -m benchmarks`: measure, print the tables."""

from __future__ import annotations

import shutil
import subprocess
import sys

from benchmarks.columns import default_columns
from benchmarks.measure import measure
from benchmarks.options import parse
from benchmarks.report import latency_table, legend, machine, profile_table, table, write_json


def main() -> None:
    options = parse()
    cuda = _has_cuda()
    measured = measure(options, options.columns or default_columns(cuda), cuda, _say)
    print(f"\n{options.model}, {options.prompt} prompt tokens, {options.steps} steps, {options.repeats} repeats")
    print(f"{machine(measured)}\n\n{table(measured, options)}\n\n{legend(measured)}")
    if options.latency:
        print(f"\n{latency_table(measured, options)}")
    if options.profile:
        print(f"\nCPU microseconds per request and step\n\n{profile_table(measured, options)}")
    if options.json is not None:
        write_json(options.json, measured, options)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _has_cuda() -> bool:
    """Asked of the driver: this process leaves the device alone."""
    if shutil.which("nvidia-smi") is None:
        return False
    return subprocess.run(["nvidia-smi"], capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    main()
