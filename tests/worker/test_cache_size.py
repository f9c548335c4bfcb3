from __future__ import annotations

import pytest

from nnsight_async.worker.cache_size import GIB, MAX_BYTES, cache_bytes

MIB = 1 << 20


@pytest.mark.parametrize(
    ("one", "free", "wanted"),
    [
        (MIB, 100 * GIB, 16 * MIB),  # a few requests
        (GIB, 100 * GIB, 4 * GIB),  # no more than the limit
        (6 * GIB, 100 * GIB, 6 * GIB),  # but one request, whatever it takes
        (GIB, 5 * GIB, 5 * GIB // 2),  # half of what is free
        (4 * GIB, 5 * GIB, 4 * GIB),  # but one request
    ],
)
def test_there_is_room_for_a_few_requests_and_for_one_at_least(one: int, free: int, wanted: int) -> None:
    assert MAX_BYTES == 4 * GIB
    assert cache_bytes(one, free, 8192) == wanted


def test_a_request_that_does_not_fit_is_refused_with_what_to_change() -> None:
    with pytest.raises(ValueError, match=r"131072 tokens .*takes 16\.0 GiB, and 8\.0 GiB .*smaller max_model_len"):
        cache_bytes(16 * GIB, 8 * GIB, 131072)
