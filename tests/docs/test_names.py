"""What the documentation names exists in the code, and what has to be named is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import nnsight_async
from nnsight_async import NNsightError
from tests.semantics.conftest import SERVED_HAS_NOT

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "nnsight_async"
FILE = re.compile(r"`([a-z_0-9]+(?:/[a-z_0-9]+)*\.py)`")


def test_the_structure_names_every_file_and_no_other() -> None:
    named = set(FILE.findall((ROOT / "docs/structure.md").read_text()))
    there = {str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py")}
    of_packages = {name for name in there if name.endswith("/__init__.py")}
    assert named <= there
    assert not there - of_packages - named, "say in docs/structure.md, in a sentence each, what these files are"


@pytest.mark.parametrize("name", [name for name in nnsight_async.__all__ if name.endswith("Error")])
def test_the_reference_says_what_to_do_about_every_error(name: str) -> None:
    assert issubclass(getattr(nnsight_async, name), NNsightError)
    table = (ROOT / "docs/reference.md").read_text().partition("## Errors")[2]
    assert f"\n| `{name}`" in table


def test_serving_says_what_its_tests_leave_out_and_why() -> None:
    page = (ROOT / "docs/serving.md").read_text()
    tests = "".join(file.read_text() for file in (ROOT / "tests/semantics").glob("test_*.py"))
    for name, reason in SERVED_HAS_NOT.items():
        assert f"def {name.partition('[')[0]}(" in tests
        assert f"\n- {reason}\n" in page
