"""The life of a request names files and functions; each is where the page says it is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "nnsight_async"
TEXT = (ROOT / "docs/life_of_a_request.md").read_text()
PARTS = re.split(r"^(?=\d+\. |## )", TEXT, flags=re.MULTILINE)
STEPS = [part for part in PARTS if re.match(r"\d+\. ", part)]
REST = [part for part in PARTS if part not in STEPS]

FILE = re.compile(r"`([a-z_0-9]+(?:/[a-z_0-9]+)*\.py)`")
NAME = re.compile(r"`((?:[A-Za-z_]\w*\.)?[A-Za-z_]\w*)(?:\(\))?`")

NOT_OURS = {"AsyncLLM", "SamplingParams", "extra_args", "with", "forward", "model", "tracer", "hidden", "done"}


def defined(file: str) -> set[str]:
    """Functions and classes of a file, and methods and attributes of its classes as `Class.name`."""
    tree = ast.parse((PACKAGE / file).read_text())
    names: set[str] = set()
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names |= {name, f"{Path(file).stem}.{name}"}
            case ast.ClassDef(name=name):
                names |= {name, *(f"{name}.{member}" for member in members(node))}
            case _:
                pass
    return names


def members(kind: ast.ClassDef) -> set[str]:
    functions = [node for node in kind.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    annotated = [node.target for node in kind.body if isinstance(node, ast.AnnAssign)]
    fields = {target.id for target in annotated if isinstance(target, ast.Name)}
    assigned = {
        node.attr
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    return {function.name for function in functions} | fields | assigned


def test_the_steps_are_numbered_in_order() -> None:
    assert [int(step.split(".", 1)[0]) for step in STEPS] == list(range(1, len(STEPS) + 1))


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.split(".", 1)[0])
def test_what_a_step_names_is_in_the_files_that_it_names(step: str) -> None:
    files = FILE.findall(step)
    assert files, "a step says where it happens"
    assert not [file for file in files if not (PACKAGE / file).is_file()]
    assert not unknown(step, files)


def test_what_the_rest_of_the_page_names_is_somewhere() -> None:
    files = [str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py")]
    assert not unknown("".join(REST), files)
    assert not set(FILE.findall("".join(REST))) - set(files)


def unknown(text: str, files: list[str]) -> list[str]:
    known = NOT_OURS.union(*map(defined, files))
    prose = FILE.sub("", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    return [name for name in NAME.findall(prose) if name not in known]
