"""The tables, from measurements made up here: no engine."""

from __future__ import annotations

import json

import pytest

from benchmarks.columns import default_columns
from benchmarks.measure import Measured
from benchmarks.options import parse
from benchmarks.report import profile_table, table, write_json


def cell(wall: float, step: float) -> dict[str, float]:
    return {"wall": wall, "step": step, "tokens": 80}


@pytest.fixture
def measured() -> Measured:
    cells = {
        ("plain", 8): [cell(1.0, 0.010), cell(1.0, 0.010), cell(9.0, 0.090)],
        ("one", 8): [cell(2.0, 0.018), cell(2.0, 0.018), cell(2.0, 0.018)],
    }
    profiles = {("one", 8): {"cpu": {"client": 0.8}, "worker": {"fire": 0.008, "sender: x": 0.1}, "client": {}}}
    return Measured(["plain", "one"], {"vllm": "1", "torch": "2", "device": "CPU"}, cells, profiles)


def test_a_row_holds_medians_and_what_a_request_costs_more(measured: Measured):
    rows = [line.split("|") for line in table(measured, parse(["--requests", "8"])).splitlines()]
    plain, one = ([part.strip() for part in row[1:-1]] for row in rows[2:])
    assert plain == ["8", "plain", "80", "1.00", "10.00", "10.00 to 90.00", ""]
    assert one == ["8", "one", "40", "0.50", "18.00", "18.00 to 18.00", "+1000"]


def test_the_senders_time_is_not_the_worker_threads(measured: Measured):
    header, _, row = profile_table(measured, parse(["--requests", "8", "--steps", "10"])).splitlines()
    found = dict(
        zip((part.strip() for part in header.split("|")), (part.strip() for part in row.split("|")), strict=True)
    )
    assert found["worker thread"] == found["fire"] == "100.0"
    assert found["sender: x"] == "1250.0"


def test_everything_is_written(measured: Measured, tmp_path):
    write_json(tmp_path / "found.json", measured, parse(["--requests", "8"]))
    found = json.loads((tmp_path / "found.json").read_text())
    assert [column["column"] for column in found["cells"]] == ["plain", "one"]


def test_the_baseline_is_always_measured():
    assert parse(["--columns", "one"]).columns == ["plain", "one"]
    assert "graphs" not in default_columns(cuda=False)


@pytest.mark.parametrize("bad", [["--columns", "two"], ["--requests", "0"], ["--steps", "x"]])
def test_bad_options_are_refused(bad):
    with pytest.raises(SystemExit):
        parse(bad)
