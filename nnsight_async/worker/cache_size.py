"""How much memory the key-value cache takes on a CPU where nobody has said it."""

from __future__ import annotations

GIB = 1 << 30

MAX_BYTES = 4 * GIB
"""What it takes at most, unless one request needs more."""

REQUESTS = 16
"""Requests of the full length that it has room for, within that."""


def cache_bytes(one: int, free: int, length: int) -> int:
    """Bytes for the cache where a request of `length` tokens takes `one`, of `free` bytes of memory at most half.

    Raises `ValueError` where one request does not fit.
    """
    if one > free:
        raise ValueError(
            f"the key-value cache of one request of {length} tokens (max_model_len) takes {one / GIB:.1f} GiB, and "
            f"{free / GIB:.1f} GiB of memory are free: set a smaller max_model_len"
        )
    return max(min(REQUESTS * one, MAX_BYTES, free // 2), one)
