"""What declared operations take, and how they travel."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

from nnsight_async.runs.ops import Op, ShippedOps, Vector, number_of, positions_of, vector_of
from nnsight_async.runs.shipment import KEY, Shipment


@pytest.mark.parametrize("number", [3.4028235e38, 3.40282356e38, 3.402823567e38, 3.41e38, 1e300, -3.4028235e38, 1e-300])
def test_numbers_are_finite_where_float32_has_them(number: float) -> None:
    if torch.tensor(number, dtype=torch.float32).isfinite():
        assert number_of(number, "steer()", "scale") == number
    else:
        with pytest.raises(ValueError, match="finite"):
            number_of(number, "steer()", "scale")


@pytest.mark.parametrize("entry", [float("nan"), float("inf"), -float("inf")])
def test_a_vector_that_is_not_finite_is_refused(entry: float) -> None:
    for at in (0, 3):
        vector = torch.ones(4)
        vector[at] = entry
        with pytest.raises(ValueError, match="not finite"):
            vector_of(vector, "steer()", 4)
    assert vector_of(torch.tensor([3e38, -3e38]), "steer()", 2).tolist() == torch.tensor([3e38, -3e38]).tolist()


def test_positions_are_numbers_that_travel() -> None:
    assert positions_of(slice(-(1 << 80), 1 << 80, 2), "steer()") == ("slice", -(1 << 62), 1 << 62, 2)
    assert positions_of(7, "steer()") == (7,)
    for far in (1 << 70, [0, -(1 << 70)]):
        with pytest.raises(ValueError, match="as long as that"):
            positions_of(far, "steer()")


def test_a_shipment_arrives_as_it_was_sent() -> None:
    vectors = [torch.arange(4.0), torch.arange(4.0) + 1]
    ops = ShippedOps.of(
        [
            Op("steer", "layers.0", Vector.of(vectors[0]), 0.5, 0.0, ("slice", 1, None, 2)),
            Op("clamp", "layers.1", Vector.of(vectors[1]), -1.0, float("inf"), (0, -1), edit=3),
        ]
    )
    sent = Shipment((7, 8), b"\x00block", 1 << 62, 2.5, (3, 4), adapter=True, ops=ops)
    params = SimpleNamespace(extra_args={"other": 1})
    sent.onto(params)
    assert isinstance(params.extra_args[KEY], bytes)
    received = Shipment.of(copy.deepcopy(params))
    assert received is not None
    assert params.extra_args["other"] == 1
    assert (received.runs, received.block, received.budget) == (sent.runs, sent.block, sent.budget)
    assert (received.timeout, received.edits, received.adapter) == (sent.timeout, sent.edits, sent.adapter)
    assert received.ops is not None
    for one, other, vector in zip(received.ops.each(), ops.each(), vectors, strict=True):
        assert (one.kind, one.path, one.low, one.high, one.positions, one.edit) == (
            other.kind, other.path, other.low, other.high, other.positions, other.edit,
        )  # fmt: skip
        assert torch.equal(one.vector.tensor(), vector)
