"""How the fuzzer runs: as many examples as are asked for, from a seed that is always the same and from one that is new.

`NNSIGHT_FUZZ_SEED` is the new one, for whoever wants a failure again; `NNSIGHT_FUZZ_TIMES` multiplies the examples.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import Any

import pytest

from tests.serve.drawn import Draw

FRESH = int(os.environ.get("NNSIGHT_FUZZ_SEED") or secrets.randbits(32))
TIMES = float(os.environ.get("NNSIGHT_FUZZ_TIMES") or 1)

fuzzed = pytest.mark.parametrize("number", [pytest.param(0, id="fixed"), pytest.param(FRESH, id="fresh")])
"""Marks a test that is given the `number` of a seed; each half of the examples comes from one."""


def fuzz(number: int, examples: int, draw: Callable[[Draw], Any], check: Callable[[Any], object]) -> None:
    """Check so many examples; a failure says which it was, and of which seed."""
    for at in range(max(1, int(examples * TIMES))):
        example = draw(Draw(f"{number} {at}"))
        try:
            check(example)
        except BaseException as error:
            error.add_note(f"of {_shown(example)}, with NNSIGHT_FUZZ_SEED={number}, after {at} others")
            raise


def breaking(corpus: list[bytes]) -> Callable[[Draw], bytes]:
    """Draws messages that are broken ones of a corpus."""
    return lambda draw: broken(draw, corpus)


def _shown(example: Any) -> str:
    return (repr(example) if not isinstance(example, bytes) else f"the bytes {example.hex()}")[:4000]


def broken(chance: Draw, corpus: list[bytes]) -> bytes:
    """A message of the corpus with a few changes of the kinds that parsers trip over."""
    data = bytearray(chance.choice(corpus))
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        at, other = chance.randrange(len(data) + 1), chance.choice(corpus)
        start = chance.randrange(len(other) + 1)
        piece = other[start : start + chance.randint(0, 40)]
        kind = chance.randrange(7)
        if kind == 0:
            data[at:at] = bytes([chance.randrange(256)])
        elif kind == 1 and at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 2:
            del data[at : at + chance.randint(1, 8)]
        elif kind == 3:
            data[at:at] = piece
        elif kind == 4:
            data[at : at + len(piece)] = piece
        elif kind == 5:
            data[at : at + 5] = chance.choice(LENGTHS)
        else:
            del data[at:]
    return bytes(data)


LENGTHS = [
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\x7f\xff\xff\xff",
    b"\xff" * 4,
    bytes(4),
    b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + bytes(7),
    b"\xcb\x7f\xf8" + bytes(6),
    b"\xd8" + bytes(17),
    b"\xc1",
    b"\xc0",
    b"\x80",
    b"\x90",
    b"\xa0",
    b"1e999",
    b"-0",
    b"null",
    b"[[[[",
    b"\\ud800",
    b"\xed\xa0\x80",
]
