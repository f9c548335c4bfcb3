"""How many values MessagePack holds, told before any of them is made."""

from __future__ import annotations

_LENGTHS = {
    **dict.fromkeys((0xC4, 0xD9), (1, 0)), **dict.fromkeys((0xC5, 0xDA), (2, 0)), **dict.fromkeys((0xC6, 0xDB), (4, 0)),
    0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1),
}  # fmt: skip
"""By the first byte of a value: how wide its length is, and how many bytes there are beside what it counts."""

_FIXED = {
    0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8, 0xD4: 2, 0xD5: 3,
    0xD6: 5, 0xD7: 9, 0xD8: 17, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4,
}  # fmt: skip
"""How many bytes follow it, where that is always the same: those of a list or a mapping are its length."""

_AFTER = [_FIXED.get(head, head & 31 if 0xA0 <= head < 0xC0 else 0) for head in range(256)]


def extent(data: memoryview, most: int) -> int:
    """How many values there are, keys and what is in lists included; `most + 1` for however many more there are.

    What is no MessagePack is counted as far as it might be some: a decoder refuses it.
    """
    at, count, end = 0, 0, len(data)
    while at < end and count <= most:
        head = data[at]
        at += 1 + _AFTER[head]
        count += 1
        if head in _LENGTHS:
            width, more = _LENGTHS[head]
            at += width + more + int.from_bytes(data[at : at + width])
    return count
