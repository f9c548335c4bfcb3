# ruff: noqa: RET504, PT012 -- a block is what is assigned in it, and may well be several statements
"""What a block uses travels: references by name, the user's own code by value, everything else as pickle does it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import functools
import importlib
import io
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest

from nnsight_async.capture.function import from_function
from nnsight_async.capture.load import load
from nnsight_async.errors import ShippingError
from nnsight_async.runs.saved import Saved

FACTOR = 3


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Config:
    width: int = 2

    def area(self) -> int:
        return self.width * helper(FACTOR)


def helper(x: int) -> int:
    return deeper(x) + 1


def deeper(x: int) -> int:
    return x * FACTOR


def in_another_process(block: Any, tmp_path: Path) -> str:
    """What the block prints in a process that has none of this test's modules."""
    (tmp_path / "payload").write_bytes(block.payload)
    program = (
        "import sys, types\n"
        "from nnsight_async.interleave import context\n"
        "context.save_expression = lambda value, name, label: value\n"
        "from nnsight_async.capture.load import load\n"
        "load(open(sys.argv[1], 'rb').read(), lambda reference: reference)(None, None)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "payload")]
    root = str(Path(cloudpickle.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}{os.pathsep}{root}"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_functions_and_classes_of_this_module_travel_by_value(trace: Any, tmp_path: Path) -> None:
    config = Config(5)
    with trace(run=False) as run:
        print(config.area(), helper(1), Colour.RED.value, type(config).__name__, isinstance(config, Config))

    assert in_another_process(run.block, tmp_path) == "50 4 1 Config True\n"


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "user_tools").mkdir()
    (tmp_path / "user_tools" / "__init__.py").write_text(
        "import threading\nLOCK = threading.Lock()\nUNUSED = object()\n"
    )
    (tmp_path / "user_tools" / "inner.py").write_text(
        "import user_single\nBIAS = 7\ndef work(x):\n    return user_single.twice(x) + BIAS\n"
        "def keep(x):\n    kept = x.save()\n    return kept\n"
    )
    (tmp_path / "user_single.py").write_text(
        "import threading\nLOCK = threading.Lock()\n"
        "def twice(x):\n    return _double(x)\ndef _double(x):\n    return 2 * x\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("user_tools.inner")
    for name in [name for name in sys.modules if name.startswith("user_")]:
        del sys.modules[name]


def test_functions_of_other_user_modules_travel_with_what_they_call(modules: Any, trace: Any, tmp_path: Path) -> None:
    work = modules.work
    with trace(run=False) as run:
        print(work(4))

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert in_another_process(run.block, elsewhere) == "15\n"


def test_a_user_module_travels_as_far_as_it_is_used(modules: Any, trace: Any, tmp_path: Path) -> None:
    import user_tools.inner  # type: ignore[import-not-found]

    with trace(run=False) as run:
        print(user_tools.inner.work(1), user_tools.inner.BIAS)

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert in_another_process(run.block, elsewhere) == "9 7\n"


def test_helpers_of_other_modules_may_save(modules: Any, trace: Any, saves: Any) -> None:
    keep = modules.keep
    with trace():
        a = keep(4)
        b = a.save()

    assert (b, saves) == (4, {"x": 4, "b": 4})


def test_loading_here_leaves_the_classes_of_the_program_alone(trace: Any) -> None:
    area = Config.area
    with trace():
        result = Config(5).area().save()

    assert result == 50
    assert Config.area is area


def test_nothing_stays_registered_with_cloudpickle(modules: Any, trace: Any) -> None:
    work, gate = modules.work, threading.Lock()
    before = cloudpickle.list_registry_pickle_by_value()
    with trace(run=False):
        work(4)
    with pytest.raises(ShippingError), trace(run=False):
        work(4, gate)

    assert cloudpickle.list_registry_pickle_by_value() == before


def test_installed_modules_travel_by_name(trace: Any) -> None:
    with trace(run=False) as run:
        cloudpickle.dumps
        pytest.approx

    assert len(run.block.payload) < 1_500


def test_a_reference_inside_other_values(trace: Any, model: Any) -> None:
    class Experiment:
        def __init__(self) -> None:
            self.model = model
            self.scale = 2

        def run(self) -> Any:
            with trace():
                result = (self.scale, self.model, [model]).save()
            return result

    model.here = "the model in the worker"

    assert Experiment().run() == (2, model.here, [model.here])


def test_a_bound_method_of_a_reference(trace: Any, model: Any) -> None:
    name = model.__block_reference__

    class Here:
        def __block_reference__(self) -> str:
            return "of the worker"

    model.here = Here()
    with trace():
        result = name().save()

    assert result == "of the worker"


def test_standard_streams_are_those_of_the_worker(trace: Any, tmp_path: Path) -> None:
    out = sys.stdout
    with trace(run=False) as run:
        print("hello", file=out)

    assert in_another_process(run.block, tmp_path) == "hello\n"


def test_streams_in_memory_travel(trace: Any) -> None:
    text, data = io.StringIO("abc"), io.BytesIO(b"de")
    with trace():
        result = (text.getvalue(), data.getvalue()).save()

    assert result == ("abc", b"de")


class Holder:
    def __init__(self, inner: object) -> None:
        self.inner = inner


def _generator() -> Any:
    yield 1


CASES: dict[str, tuple[Any, str]] = {
    "lock": (threading.Lock, "create one inside the block"),
    "condition": (threading.Condition, "create one inside the block"),
    "file": (Path(os.devnull).open, "read the file above the block"),
    "binary file": (functools.partial(Path(os.devnull).open, "rb"), "read the file above the block"),
    "generator": (_generator, "make it a list above the block"),
    "socket": (socket.socket, "belongs to its process"),
    "event loop": (asyncio.new_event_loop, "no event loop runs in the worker"),
    "saved": (lambda: Saved(SimpleNamespace(source=lambda name: threading.RLock()), "x"), "await it above the block"),
    "frame": (sys._getframe, "take the values you need out of the frame"),
}


@pytest.mark.parametrize(("make", "advice"), CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("wrap", [lambda v: v, Holder, lambda v: {"deep": [v]}], ids=["bare", "attribute", "nested"])
def test_what_cannot_travel_is_named(make: Any, advice: str, wrap: Any, trace: Any) -> None:
    inner = make()
    held = wrap(inner)
    try:
        with pytest.raises(ShippingError) as refused, trace(run=False):
            before = 1
            held  # line of the use
    finally:
        with contextlib.suppress(AttributeError):
            inner.close()

    message = str(refused.value)
    assert "'held'" in message
    assert f"{__file__}, line {test_what_cannot_travel_is_named.__code__.co_firstlineno + 8}" in message
    assert advice in message
    if isinstance(held, Holder):
        assert "held.inner" in message
    if isinstance(held, dict):
        assert "held['deep'][0]" in message


def test_a_future_cannot_travel(trace: Any) -> None:
    async def run() -> None:
        future = asyncio.get_running_loop().create_future()
        async with trace():
            future

    with pytest.raises(ShippingError, match=r"'future'(.|\n)*await it above the block"):
        asyncio.run(run())


LOCK = threading.Lock()


def locking() -> None:
    with LOCK:
        pass


def test_a_lock_that_a_helper_uses_is_named(trace: Any) -> None:
    with pytest.raises(ShippingError, match=r"'locking', a function \(LOCK in locking is a lock\)"), trace():
        locking()


class Owned:
    __block_advice__ = "use that of this model"

    def __init__(self, owner: object) -> None:
        self.__block_owner__ = owner

    def __block_reference__(self) -> tuple[str, ...]:
        return ("model",)


@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: {"deep": [v]}], ids=["bare", "nested"])
def test_what_belongs_to_another_model_is_named(wrap: Any) -> None:
    ours, theirs = object(), object()
    mine, other = wrap(Owned(ours)), wrap(Owned(theirs))

    def uses_mine(model: Any, tracer: Any) -> object:
        return mine

    def uses_both(model: Any, tracer: Any) -> object:
        return mine, other

    assert from_function(uses_mine, [ours]).payload
    with pytest.raises(ShippingError, match=r"'other'.*belongs to another model or trace(.|\n)*use that of this model"):
        from_function(uses_both, [ours])
    assert from_function(uses_both, [ours, theirs]).payload


def test_the_cause_is_kept(trace: Any) -> None:
    class Refuses:
        def __reduce__(self) -> Any:
            raise ZeroDivisionError("my own reason")

    value = Refuses()
    with pytest.raises(ShippingError, match="my own reason") as refused, trace():
        value

    assert isinstance(refused.value.__cause__, ZeroDivisionError)


def test_a_block_of_another_python_is_refused(trace: Any) -> None:
    with trace(run=False) as run:
        pass
    payload = bytes([3, 9]) + run.block.payload[2:]

    with pytest.raises(ShippingError, match=r"made by Python 3\.9 and this worker runs Python 3\.1"):
        load(payload, lambda reference: reference)


def test_threads_ship_at_the_same_time(modules: Any, trace: Any) -> None:
    work, results = modules.work, []
    start = threading.Barrier(4)

    def ship() -> None:
        start.wait(timeout=30)
        for _ in range(25):
            with trace(run=False) as run:
                work(1)
            results.append(len(run.block.payload))

    threads = [threading.Thread(target=ship) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)

    assert len(results) == 100
    assert min(results) > 300  # each has the functions, not their names
