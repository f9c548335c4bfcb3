"""Blocks in cells of a notebook: a Jupyter kernel of its own, with an engine in it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

from nnsight_async.testing.oracle import generation

ROOT = Path(__file__).parents[2]
PROMPT = [5, 17, 101, 9, 33, 250, 77]
STEPS = 3
TIMEOUT = 300  # seconds

SETUP = f"""
from nnsight_async import VLLM, save
from nnsight_async.testing import tiny_checkpoint
from nnsight_async.testing.engine import tiny_engine_args


class Blocking(VLLM):  # the same engine under a model of the other mode
    def _build(self):
        self._engine = model._build()
        return self._engine

model = VLLM(tiny_checkpoint("llama"), mode="async", dispatch=True, **tiny_engine_args())
blocking = Blocking(tiny_checkpoint("llama"), **tiny_engine_args())
PROMPT, GREEDY = {PROMPT}, dict(max_tokens={STEPS}, temperature=0.0, ignore_eos=True)
"""

FUNCTION = """
def {name}():
    with blocking.trace(PROMPT, **GREEDY):
        x = save({number})
    return x
"""


@dataclass
class Shown:
    """What a cell shows."""

    text: str = ""
    error: str = ""
    traceback: list[str] = field(default_factory=list)

    def take(self, message: dict[str, Any]) -> None:
        content = message["content"]
        match message["msg_type"]:
            case "stream" if content["name"] == "stdout":
                self.text += content["text"]
            case "execute_result":
                self.text += content["data"]["text/plain"] + "\n"
            case "error":
                self.error = f"{content['ename']}: {content['evalue']}"
                self.traceback = [re.sub(r"\x1b\[[\d;]*m", "", part) for part in content["traceback"]]
            case _:
                pass


class Notebook:
    def __init__(self, client: Any) -> None:
        self._client = client

    def try_cell(self, text: str) -> Shown:
        shown = Shown()
        self._client.execute_interactive(text, timeout=TIMEOUT, allow_stdin=False, output_hook=shown.take)
        return shown

    def cell(self, text: str) -> str:
        """What a cell prints, and the value of its last expression."""
        shown = self.try_cell(text)
        assert not shown.error, "\n".join([shown.error, *shown.traceback])
        return shown.text


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    folder = tmp_path_factory.mktemp("kernel")
    ours = {"IPYTHONDIR": str(folder), "JUPYTER_RUNTIME_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    kernel = KernelManager(transport="ipc", ip=str(folder / "k"), connection_file=str(folder / "kernel.json"))
    kernel.start_kernel(env={**os.environ, **ours})
    client = kernel.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=TIMEOUT)
        notebook = Notebook(client)
        notebook.cell(SETUP)
        yield notebook
        notebook.cell("model.close()")
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def ids(hf: Any) -> list[int]:
    return generation(hf, PROMPT, STEPS).ids


def test_a_with(notebook, ids):
    shown = notebook.cell("""
with blocking.trace(PROMPT, **GREEDY) as tracer:
    drawn = save([])
    for _ in tracer.iter[:]:
        drawn.append(int(blocking.logits.argmax()))
drawn
""")
    assert shown == f"{ids}\n"


def test_an_async_with_and_tokens_as_they_come(notebook, ids):
    shown = notebook.cell("""
async with model.trace(PROMPT, **GREEDY) as tracer:
    for step in tracer.iter[:]:
        top = model.logits.argmax(-1).save()
async for token in tracer.stream():
    print(token.index, token.id == int(token.saves["top"]), token.id)
int(await top)
""")
    assert shown == "".join(f"{step} True {number}\n" for step, number in enumerate(ids)) + f"{ids[-1]}\n"


def test_the_last_statement_of_a_cell_and_one_under_an_if(notebook):
    notebook.cell("with blocking.trace(PROMPT, **GREEDY): last = save(1)")
    notebook.cell("if last:\n    async with model.trace(PROMPT, **GREEDY):\n        under = save(last + 1)")
    assert notebook.cell("last, await under") == "(1, 2)\n"


def test_a_cell_that_is_edited_and_run_again(notebook):
    notebook.cell(FUNCTION.format(name="traced", number=1))
    assert notebook.cell("traced()") == "1\n"
    notebook.cell("earlier = traced")
    notebook.cell(FUNCTION.format(name="traced", number=2))
    assert notebook.cell("traced(), earlier(), traced()") == "(2, 1, 2)\n"


def test_cells_under_one_name_never_run_the_text_of_another(notebook):
    notebook.cell("import os; os.environ['IPYKERNEL_CELL_NAME'] = 'cell.py'")
    try:
        notebook.cell(FUNCTION.format(name="one", number=1))
        notebook.cell(FUNCTION.format(name="two", number=2))
        refused = notebook.try_cell("one()")
    finally:
        notebook.cell("del os.environ['IPYKERNEL_CELL_NAME']")
    assert refused.error.startswith("CaptureError: cell.py changed after it was loaded")


@pytest.mark.parametrize("magic", ["%%time", "%%capture", "%%prun -q"])
def test_a_cell_under_a_magic(notebook, magic):
    for number in (1, 2):
        block = "with blocking.trace(PROMPT, **GREEDY):\n    x = save(before * 10)"
        notebook.cell(f"{magic}\nbefore = {number}\n{block}\nx\n")
        assert notebook.cell("x") == f"{number}0\n"


def test_a_function_from_a_cell_under_a_magic(notebook):
    notebook.cell("%%time" + FUNCTION.format(name="timed", number=7))
    assert notebook.cell("timed()") == "7\n"


def test_a_magic_that_changes_the_text_names_the_function_form(notebook):
    refused = notebook.try_cell("%%timeit -n1 -r1\nwith blocking.trace(PROMPT, **GREEDY):\n    x = save(1)\n")
    assert refused.error.startswith("CaptureError: the source of '<magic-timeit>' cannot be had")
    assert "def probe(model, tracer)" in refused.error


def test_what_other_cells_define_travels(notebook):
    notebook.cell("class Scale:\n    by = 3\n    def __call__(self, x):\n        return x * self.by * FACTOR")
    notebook.cell("FACTOR = 5")
    notebook.cell("with blocking.trace(PROMPT, **GREEDY):\n    x = save(Scale()(2))\n")
    assert notebook.cell("x") == "30\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "with blocking.trace(PROMPT):\n    a = 1\n    1 / 0  # here\nprint(a)\n",
            "----> 3     1 / 0  # here",
        ),
        ("async with model.trace(PROMPT, **GREEDY):\n    b = 1 / 0\n    b.save()\nawait b\n", "----> 2     b = 1 / 0"),
    ],
    ids=["with", "async with"],
)
def test_the_traceback_ends_at_the_line_of_the_cell(notebook, text, line):
    shown = notebook.try_cell(text)
    last = [part for part in shown.traceback if part.startswith(("Cell ", "File "))][-1]
    assert shown.error == "ZeroDivisionError: division by zero"
    assert last.startswith("Cell In[")
    assert line in last
    assert shown.traceback[-1] == f"prompt: {PROMPT}"
