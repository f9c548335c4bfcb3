from __future__ import annotations

import pytest

from tests.worker.simulation import Simulation


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    """A worker and its callers without an engine."""
    return Simulation()
