from __future__ import annotations

import pytest

from benchmarks.client import WORKS, measure


@pytest.mark.parametrize("work", WORKS)
def test_both_threads_are_seen(work):
    found = measure(work, 3, 5)
    engine, caller = found["engine's thread"], found["caller's thread"]
    assert found["both"] == pytest.approx(engine + caller)
    assert caller > 0
    assert (engine > 0) == (work != "plain")  # which has one loop
