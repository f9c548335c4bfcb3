from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_the_demo_answers_with_a_late_layers_guesses_beside_each_token() -> None:
    command = [sys.executable, "-m", "nnsight_async.demo"]
    shown = subprocess.run(command, env=os.environ, stdout=subprocess.PIPE, text=True, check=True, timeout=300).stdout

    lines = shown.splitlines()
    assert any(line.startswith("'The'") for line in lines)
    assert any(line.startswith("' Paris'") and "' City'" in line for line in lines)
