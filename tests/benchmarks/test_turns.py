from __future__ import annotations

import pytest

from benchmarks.turns import PARTS, WORKS, measure


@pytest.mark.parametrize("work", WORKS)
def test_every_part_is_seen(work):
    found = measure(work, 3, 5)
    assert list(found) == ["worker thread", *PARTS, "client: decode"]
    assert min(found["begin_step"], found["fire"], found["end_step"], found["client: decode"]) > 0
