"""Parsing in several threads, while objects are collected whose ends let other threads run."""

from __future__ import annotations

import ast
import gc
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from nnsight_async.parse import parse, parse_expression

TEXT = "x = " + " + ".join(f"f({number}, [a for a in b])" for number in range(100))
THREADS = 8


class Ends:
    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        time.sleep(0)


@pytest.fixture
def restless() -> Iterator[None]:
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(5, 1, 1)
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("restless")
def test_threads_parse_at_the_same_time() -> None:
    wanted = ast.dump(parse(TEXT))

    def parses(_: int) -> str:
        Ends()
        return ast.dump(parse(TEXT))

    with ThreadPoolExecutor(THREADS) as pool:
        assert set(pool.map(parses, range(20 * THREADS))) == {wanted}


def test_errors_and_expressions() -> None:
    assert ast.unparse(parse_expression("1+1")) == "1 + 1"
    with pytest.raises(SyntaxError) as caught:
        parse("(", "somewhere")
    assert caught.value.filename == "somewhere"
