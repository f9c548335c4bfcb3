"""Exceptions between processes that do not trust each other."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from nnsight_async import BlockError, ShapeError
from nnsight_async.runs import failures
from nnsight_async.runs.carried import carried, carry, rebuilt


class OwnError(ValueError):
    pass


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"), KeyError("k"), KeyError(3), ShapeError("rows"), OSError(2, "gone", "f"), ZeroDivisionError(),
        UnicodeDecodeError("utf8", b"x", 0, 1, "bad"), AttributeError("a"), TimeoutError("late"), RuntimeError("a", 1),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_exceptions_of_known_classes_are_rebuilt(error: Exception) -> None:
    for packed in (carried(failures.pack(raised(error), "note"), lambda _: True), carry(error)):
        found = rebuilt(packed)
        assert type(found) is type(error)
        assert str(found) == str(error)
        assert found.args == error.args


@pytest.mark.parametrize(
    "error", [OwnError("x"), SystemExit(1), KeyboardInterrupt(), StopIteration(), ExceptionGroup("g", [ValueError()])]
)
def test_others_are_told_of(error: BaseException) -> None:
    found = rebuilt(carried(failures.pack(raised(error), "note"), lambda _: True))
    assert type(found) is BlockError
    assert type(error).__name__ in str(found)
    assert found.__notes__ == ["note"]


def test_nothing_pickled_leaves() -> None:
    packed = failures.pack(raised(ValueError("x")), "note")
    assert b"builtins" in packed
    stripped = carried(packed, lambda _: False)
    assert len(stripped) < len(packed)
    assert __file__.encode() not in stripped
    assert b"\x80\x05" not in stripped  # how a pickle begins


def test_a_chain_comes_whole_and_a_hostile_one_is_cut() -> None:
    try:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise ValueError("outer") from inner
    except ValueError as caught:
        found = rebuilt(carried(failures.pack(caught, "n"), lambda _: True))
    assert isinstance(found.__cause__, KeyError)
    deep: Any = None
    for _ in range(40):
        deep = [
            "ValueError",
            "x",
            [["f", 1 << 40, "g"], ["f\0", 1, "g"]],
            ["n"] * 100,
            None,
            deep,
            None,
            "builtins",
            ["x"],
        ]
    cut: BaseException | None = rebuilt(msgspec.msgpack.encode(deep))
    count = 0
    while cut is not None:
        count, cut = count + 1, cut.__cause__
    assert count <= failures.LINKS + 1
    for junk in (b"", b"\xc1", b"\x91" * 5000 + b"\x01", msgspec.msgpack.encode([1, 2])):
        with pytest.raises(ValueError, match="malformed"):
            rebuilt(junk)
