from __future__ import annotations

from contextlib import nullcontext
from inspect import currentframe
from typing import Any

from nnsight_async.capture.entered import is_entered


def call(*args: Any, **kwargs: Any) -> Any:
    frame = currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return nullcontext(is_entered(frame.f_back))


def test_calls_that_a_with_enters() -> None:
    options: dict[str, int] = {}
    with call() as plain, call(1, a=2) as keywords, call(*[1], **options) as unpacked:
        assert (plain, keywords, unpacked) == (True, True, True)


async def test_calls_that_an_async_with_enters() -> None:
    async with call(1) as entered:
        assert entered


def test_other_calls() -> None:
    kept = call(1)
    assert not kept.enter_result
    assert not call(a=1).enter_result
    with nullcontext(call()) as inner:
        assert not inner.enter_result
