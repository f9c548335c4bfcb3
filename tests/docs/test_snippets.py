"""Every Python snippet of the README and of docs/, page by page and in order, against a real engine.

A ```text block right after a snippet is what the snippet prints. What a page claims about values, its snippets assert.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import linecache
import re
import subprocess
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar

import pytest

import nnsight_async
from nnsight_async import VLLM, TransformersModel
from nnsight_async.serve.server import Server
from nnsight_async.testing.engine import tiny_engine_args

ROOT = Path(__file__).parents[2]
FENCED = re.compile(r"^```python\n(?P<code>.*?)^```$(?:\n+^```text\n(?P<printed>.*?)^```$)?", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    """One snippet of a page; `printed` is the text that the page shows under it."""

    name: str
    code: str
    printed: str | None

    def at(self, url: str) -> Snippet:
        """The same, with another server than the pages'."""
        return replace(self, code=self.code.replace(SERVED, url))

    def run(self, names: dict[str, Any], runner: asyncio.Runner) -> str:
        """Run as a notebook would, with `await` allowed at the top; returns what was printed."""
        linecache.cache[self.name] = (len(self.code), None, self.code.splitlines(keepends=True), self.name)
        code = compile(self.code, self.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        with redirect_stdout(StringIO()) as printed:
            ran = eval(code, names)
            if inspect.iscoroutine(ran):
                runner.run(ran)
        return printed.getvalue()


def snippets(page: Path) -> list[Snippet]:
    text = page.read_text()
    return [
        Snippet(f"<{page.name}:{text.count(chr(10), 0, found.start()) + 2}>", found["code"], found["printed"])
        for found in FENCED.finditer(text)
    ]


SERVED = "http://127.0.0.1:6677"
"""The server of the pages."""

PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if snippets(page)]


COMMANDS = [
    found.group(1)
    for page in sorted((ROOT / "docs").glob("*.md"))
    for found in re.finditer(r"^```bash\n(curl .*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
]


class Borrowed(VLLM):
    """What `VLLM(...)` of a snippet builds: a model of its own on the engine that all tests share."""

    lender: ClassVar[VLLM]

    def __new__(cls, repo: str, **given: Any) -> Any:
        if "serve" in given:
            return VLLM(cls.lender.repo, **given)
        return super().__new__(cls)

    def __init__(self, repo: str, **given: Any) -> None:
        super().__init__(self.lender.repo, **{**tiny_engine_args(), **given})

    def _build(self) -> Any:
        if self._closed:
            return super()._build()
        self._engine = self.lender._build()
        self.__dict__.setdefault("_root", self.lender.tree)
        return self._engine

    def close(self) -> None:
        self._closed = True


@pytest.fixture
def borrowing(model: VLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Borrowed, "lender", model, raising=False)
    monkeypatch.setattr(nnsight_async, "VLLM", Borrowed)
    monkeypatch.setattr(nnsight_async, "TransformersModel", partial(_local, model.repo))


def _local(tiny: str, given: Any, **more: Any) -> TransformersModel:
    return TransformersModel(tiny if isinstance(given, str) else given, **more)


@pytest.fixture(scope="module")
def server(model: VLLM) -> Iterator[Server]:
    with Server(model) as serving:
        yield serving


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.usefixtures("borrowing")
def test_snippets_run_and_print_what_the_page_shows(page: Path, server: Server) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    with asyncio.Runner() as runner:
        for snippet in snippets(page):
            printed = snippet.at(server.url).run(names, runner)
            if snippet.printed is not None:
                assert printed == snippet.printed, snippet.name


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_print_what_is_asked_for(server: Server, command: str) -> None:
    ran = subprocess.run(
        ["bash", "-c", command.replace(SERVED, server.url)], capture_output=True, text=True, timeout=300, check=True
    )
    assert '"id":' in ran.stdout
    assert "error" not in ran.stdout


def test_links_lead_to_files_and_headings_that_exist() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    broken = [f"{page.name}: {link}" for page in pages for link in links(page) if not leads_somewhere(page, link)]
    assert not broken


def links(page: Path) -> list[str]:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [link for link in re.findall(r"\]\(([^)]+)\)", prose) if "://" not in link]


def leads_somewhere(page: Path, link: str) -> bool:
    file, _, heading = link.partition("#")
    target = page.parent / file if file else page
    return target.exists() and (not heading or heading in headings(target))


def headings(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
