"""The text that is compiled is the text that runs, or there is an error that says so."""

from __future__ import annotations

import doctest
import importlib.util
import linecache
import os
import subprocess
import sys
import threading
import types
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nnsight_async.errors import CaptureError

PROGRAM = """
def run(trace):
    before = 1
    with trace():
        x = before + 1
        x.save()
    done = True
    result = x
    return result if done else None
"""


def load_module(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    later = path.stat().st_mtime + 10
    os.utime(path, (later, later))


def test_a_file(program: Path, trace: Any) -> None:
    assert load_module(program).run(trace) == 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("before + 1", "before + 2"),
        ("before + 1", "before - 1"),
        ("        x = before + 1\n        x.save()\n", "        x = before + 1\n        x\n"),
        ("        x.save()\n", ""),
        ("        x.save()\n", "        x.save()\n        y = 1\n"),
        ("def run", "\ndef run"),
        ("with trace():", "if trace():"),
        ("with trace():", "with trace(:"),
    ],
)
def test_a_file_edited_after_it_was_loaded_is_not_traced(old: str, new: str, program: Path, trace: Any) -> None:
    module = load_module(program)
    edit(program, old, new)

    with pytest.raises(CaptureError, match=r"program\.py changed after it was loaded.*Reload"):
        module.run(trace)


def test_an_edit_elsewhere_in_the_file_does_not_matter(program: Path, trace: Any) -> None:
    module = load_module(program)
    edit(program, "result = x", "result = 7")

    assert module.run(trace) == 2


def test_an_edit_after_the_first_capture_does_not_matter(program: Path, trace: Any) -> None:
    module = load_module(program)
    module.run(trace)
    edit(program, "before + 1", "before + 2")

    assert module.run(trace) == 2


def test_a_module_loaded_again_is_traced_anew(program: Path, trace: Any) -> None:
    load_module(program).run(trace)
    edit(program, "before + 1", "before + 2")

    assert load_module(program).run(trace) == 3


def test_a_file_that_is_gone(program: Path, trace: Any) -> None:
    module = load_module(program)
    program.unlink()
    linecache.clearcache()

    with pytest.raises(CaptureError, match=r"def probe\(model, tracer\)"):
        module.run(trace)


def test_text_without_a_source(trace: Any) -> None:
    namespace: dict[str, Any] = {}
    exec(PROGRAM, namespace)

    with pytest.raises(
        CaptureError, match=r"function form(.|\n)*def probe\(model, tracer\)(.|\n)*model\.run\(prompt, probe\)"
    ):
        namespace["run"](trace)


def test_a_cell_known_to_linecache(cell: Any, trace: Any) -> None:
    assert cell(PROGRAM + "result = run(trace)", trace=trace)["result"] == 2


def test_a_cell_with_another_text_under_the_same_name(cell: Any, trace: Any) -> None:
    namespace = cell(PROGRAM, trace=trace)
    filename = namespace["run"].__code__.co_filename
    text = PROGRAM.replace("before + 1", "before + 9")
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)

    with pytest.raises(CaptureError):
        namespace["run"](trace)


def test_asserts_that_pytest_has_rewritten(trace: Any) -> None:
    limit = 3
    assert limit, "before"
    with trace():
        assert limit == 3, "inside"
        x = limit * 2
        assert [y for y in (x,) if y] == [6]
        x.save()
    assert x == 6, "after"


def test_a_body_that_begins_with_an_assert(trace: Any) -> None:
    limit = 3
    with trace():
        assert limit == 3
        x = (limit).save()

    assert x == 3


def test_a_doctest(trace: Any) -> None:
    text = ">>> with trace():\n...     x = 3\n...     x.save()\n>>> x\n3\n"
    case = doctest.DocTestParser().get_doctest(text, {"trace": trace}, "example", "example.py", 0)

    assert doctest.DocTestRunner(verbose=False).run(case).failed == 0


def test_templates_go_with_the_code_they_were_made_from(cell: Any, trace: Any) -> None:
    import gc

    from nnsight_async.capture import compile as compiling

    def kept() -> int:
        gc.collect()
        return len(compiling._templates)

    before = kept()
    for _ in range(3):
        cell("with trace():\n    x = 1\n    x.save()\n", trace=trace)

    assert kept() <= before


def test_future_imports_hold_in_the_block(cell: Any, trace: Any) -> None:
    text = """
    from __future__ import annotations
    with trace():
        def f(x: Missing): return 1
        x = f(0).save()
    """

    assert cell(text, trace=trace)["x"] == 1


SCRIPT = """
import sys
from nnsight_async.capture.body import BodyCapture
class T:
    def __enter__(self):
        self.c = BodyCapture(sys._getframe(1))
        self.c.skip(self)
        return self
    def __exit__(self, *e):
        return self.c.leave(*e)
with T() as t:
    print('ran')
    x = (1).save()
print(t.c.block().names)
"""


@pytest.mark.parametrize("options", [["-c"], ["-Bc"], ["-X", "dev", "-c"]], ids=" ".join)
def test_python_dash_c(options: list[str]) -> None:
    command = [sys.executable, *options, SCRIPT, "an argument"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)

    assert result.stdout == "('x',)\n"


def test_another_text_beside_that_of_python_dash_c() -> None:
    program = f"exec({SCRIPT!r}.replace('(1)', '(2)'))\n{SCRIPT}"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert "def probe(model, tracer)" in result.stderr
    assert result.stdout == ""


def test_a_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)

    assert result.stdout == "('x',)\n"


@pytest.fixture
def shell(trace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance(user_ns={"trace": trace})
    yield shell
    shell.history_manager.end_session()
    InteractiveShell.clear_instance()


def run_cells(shell: Any, *cells: str) -> Any:
    for cell in cells:
        shell.run_cell(cell, store_history=True).raise_error()
    return shell.user_ns["x"]


BLOCK = "with trace():\n    x = a + 1\n    x.save()\n"


@pytest.mark.parametrize(
    "cell",
    [
        BLOCK,
        BLOCK + "x\n",
        "a = 1\n" + BLOCK + "x\n",
        "async " + BLOCK,
        "async " + BLOCK + "import asyncio\nawait asyncio.sleep(0)\n",
        "if a:\n    with trace():\n        x = a + 1\n        x.save()\n",
        "for a in [1]:\n    async with trace():\n        x = a + 1\n        x.save()\n",
    ],
)
@pytest.mark.parametrize("name", ["<ipython-input-1>", "/tmp/ipykernel_1/1.py"], ids=["prompt", "kernel"])
def test_an_ipython_cell(cell: str, name: str, shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell.compile, "get_code_name", lambda *texts: name)

    assert run_cells(shell, "a = 1", cell) == 2
    assert run_cells(shell, "a = 1", cell.replace("a + 1", "a + 2")) == 3


@pytest.mark.parametrize("magic", ["%%time", "%%capture", "%%prun -q", "%time"])
def test_an_ipython_cell_under_a_magic(magic: str, shell: Any) -> None:
    block = BLOCK if magic.startswith("%%") else "with trace(): x = (a + 1).save()"
    separator = "\n" if magic.startswith("%%") else " "
    cells = [f"{magic}{separator}{block}", f"{magic}{separator}{block}x\n" if magic == "%%time" else "a"]

    assert run_cells(shell, "a = 1", *cells) == 2
    assert run_cells(shell, "a = 2", *cells) == 3


def test_a_function_from_a_cell_under_a_magic(shell: Any) -> None:
    cell = "%%time\ndef {}():\n    with trace():\n        x = {}\n        x.save()\n    return x\n"
    run_cells(shell, "x = 0", cell.format("one", 1), cell.format("two", 2))

    assert run_cells(shell, "x = one(), two()") == (1, 2)


def test_a_magic_that_changes_the_text(shell: Any) -> None:
    shell.run_cell("a = 1")

    with pytest.raises(CaptureError, match=r"<magic-timeit>.*cannot be had"):
        shell.run_cell("%%timeit -n1 -r1\n" + BLOCK, store_history=True).raise_error()


TYPED = """import sys
from nnsight_async.capture.body import BodyCapture
class T:
    def __enter__(self):
        self.c = BodyCapture(sys._getframe(1))
        self.c.skip()
    def __exit__(self, *e):
        return self.c.leave(*e)

t = T()
with t:
    print('r' + 'an')
    x = (1).save()

print('names', t.c.block().names)
def f():
    with t: y = (1).save()

y = 0
f()
print('names', t.c.block().names)
exit()
"""


def test_pythons_own_prompt(tmp_path: Path) -> None:
    """At a terminal, in the plain form of the prompt, which Python 3.13 still has for simple terminals."""
    import pty

    environment = {**os.environ, "PYTHON_BASIC_REPL": "1", "PYTHON_HISTORY": str(tmp_path / "history"), "TERM": "dumb"}
    ours, theirs = pty.openpty()
    command = [sys.executable, "-q"]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as prompt:
        os.close(theirs)
        os.write(ours, TYPED.encode())
        late, shown = threading.Timer(300, prompt.kill), b""
        late.start()
        with suppress(OSError):  # nobody has the other end any more
            while said := os.read(ours, 1 << 16):
                shown += said
        late.cancel()
        os.close(ours)

    assert [line.strip() for line in shown.decode().splitlines() if line.startswith("names")] == [
        "names ('x',)",
        "names ('y',)",
    ]
    assert b"ran\r\n" not in shown
    assert b"Error" not in shown


def test_a_program_on_standard_input_names_the_function_form() -> None:
    result = subprocess.run([sys.executable, "-"], input=SCRIPT, capture_output=True, text=True, check=False)

    assert "def probe(model, tracer)" in result.stderr
    assert result.stdout == ""


def test_a_module_in_a_zip_file(tmp_path: Path, trace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "lib.zip", "w") as archive:
        archive.writestr("zipped_program.py", PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path / "lib.zip"))
    module = importlib.import_module("zipped_program")

    assert module.run(trace) == 2


def test_a_file_with_an_encoding_of_its_own(tmp_path: Path, trace: Any) -> None:
    path = tmp_path / "latin.py"
    text = "# -*- coding: latin-1 -*-\n" + PROGRAM.replace("before + 1", "len('\xe4\xf6') + before")
    path.write_bytes(text.encode("latin-1"))

    assert load_module(path).run(trace) == 3


def test_a_file_with_tabs_carriage_returns_and_no_newline_at_its_end(tmp_path: Path, trace: Any) -> None:
    path = tmp_path / "program.py"
    path.write_bytes(PROGRAM.strip().replace("    ", "\t").replace("\n", "\r\n").encode())

    assert load_module(path).run(trace) == 2
