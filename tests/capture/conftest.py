from __future__ import annotations

import itertools
import linecache
import sys
import textwrap
from typing import Any, Self

import pytest

from nnsight_async.capture.block import Block
from nnsight_async.capture.body import BodyCapture
from nnsight_async.capture.load import load
from nnsight_async.interleave import context


class Model:
    """Stands for the model: it travels as a name, and `load` puts `here` in its place."""

    def __init__(self, here: object = None) -> None:
        self.here = here if here is not None else self

    def __block_reference__(self) -> tuple[str, ...]:
        return ("model",)

    def __reduce__(self) -> Any:
        raise AssertionError("a reference was pickled by value")


class SavingBlock:
    """Stands for the block that runs."""

    def __init__(self) -> None:
        self.saved: dict[str, object] = {}

    def save(self, value: object, name: str | None = None, label: str | None = None) -> object:
        self.saved[name or label or "?"] = value
        return value


class Trace:
    """Captures the body of a `with`, runs it through its serialised form, and binds what it saved."""

    def __init__(self, saves: dict[str, object], model: Model, *, run: bool = True) -> None:
        self._saves = saves
        self._model = model
        self._run = run
        self.block: Block | None = None
        self.captured = False

    saves_by_name = True

    def save(self, value: object, name: str | None = None) -> object:
        return context.save(value, name)

    def __block_reference__(self) -> tuple[str, ...]:
        return ("tracer",)

    def __enter__(self) -> Self:
        return self._enter(sys._getframe(1))

    def _enter(self, frame: Any) -> Trace:
        self._capture = BodyCapture(frame)
        self._capture.skip(self)
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:  # noqa: PYI036
        skipped = self._capture.leave(kind, error, traceback)
        if error is not None and not skipped:
            return False
        self.captured = True
        self.block = self._capture.block()
        if self._run:
            self._run_block(self.block)
        return skipped

    def _run_block(self, block: Block) -> None:
        load(block.payload, self._resolve)(self._model, self)
        self._capture.bind({name: self._saves[name] for name in block.names if name in self._saves})

    def _resolve(self, reference: tuple[str, ...]) -> object:
        return {"model": self._model.here, "tracer": self}[reference[0]]

    def __aenter__(self) -> Any:
        return _ready(self._enter(sys._getframe(1)))

    def __aexit__(self, kind: Any, error: Any, traceback: Any) -> Any:
        return _ready(self.__exit__(kind, error, traceback))


async def _ready(value: Any) -> Any:
    return value


@pytest.fixture
def saves(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What blocks have saved in this test, by name, or by label where there is no name."""
    block = SavingBlock()
    monkeypatch.setattr(context, "current", lambda: block)
    return block.saved


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def trace(saves: dict[str, object], model: Model) -> Any:
    """A new trace; `run=False` only captures."""
    return lambda **options: Trace(saves, model, **options)


_numbers = itertools.count()


@pytest.fixture
def cell() -> Any:
    """Runs text as a notebook cell: under a name that only linecache knows. Returns its namespace."""

    def run(text: str, **namespace: Any) -> dict[str, Any]:
        text = textwrap.dedent(text)
        filename = f"<cell {next(_numbers)}>"
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
        namespace.setdefault("__name__", "__main__")
        exec(compile(text, filename, "exec"), namespace)
        return namespace

    return run
