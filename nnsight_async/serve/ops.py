"""Declared operations on their way to a server, which makes them anew from what it hears."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import torch

from nnsight_async.runs.ops import Capture, Kind, Op
from nnsight_async.runs.ops import Vector as OwnVector
from nnsight_async.tree.references import envoy_at

if TYPE_CHECKING:
    from nnsight_async.runs.declaring import Declaring
    from nnsight_async.runs.ops import Ops, Positions

MOST = 1000
Number = Annotated[int, msgspec.Meta(ge=0, lt=MOST)]
Position = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=1 << 31)]
Path = Annotated[str, msgspec.Meta(max_length=500)]


class Slice(msgspec.Struct, forbid_unknown_fields=True):
    """A slice of positions."""

    start: Position | None
    stop: Position | None
    step: Position | None


Where = None | Literal["prompt", "generated"] | Annotated[list[Position], msgspec.Meta(max_length=10_000)] | Slice


class Vector(msgspec.Struct, array_like=True):
    dtype: Literal["float32", "float16", "bfloat16"]
    data: bytes


class Change(msgspec.Struct, array_like=True):
    """An operation that changes the stream. `vector` is the number of one; a bound that there is not is None."""

    kind: Kind
    path: Path
    vector: Number
    low: float | None
    high: float | None
    where: Where


class Taken(msgspec.Struct, array_like=True):
    """A stream that is captured."""

    path: Path
    name: Path


class Operations(msgspec.Struct, forbid_unknown_fields=True):
    """Those of a request: each vector once."""

    vectors: Annotated[list[Vector], msgspec.Meta(max_length=MOST)]
    changes: Annotated[list[Change], msgspec.Meta(max_length=MOST)]
    captures: Annotated[list[Taken], msgspec.Meta(max_length=MOST)]


def said(ops: Iterable[Op | Capture]) -> Operations | None:
    """What is sent of them; None if there are none."""
    numbers: dict[bytes, int] = {}
    told = Operations([], [], [])
    for op in ops:
        if isinstance(op, Capture):
            told.captures.append(Taken(op.path, op.name))
            continue
        number = numbers.setdefault(op.vector.digest, len(numbers))
        if number == len(told.vectors):
            told.vectors.append(Vector(op.vector.dtype, op.vector.data))  # type: ignore[arg-type]
        told.changes.append(Change(op.kind, op.path, number, _told(op.low), _told(op.high), _where(op.positions)))
    return told if told.changes or told.captures else None


def heard(told: Operations, model: Declaring) -> Ops:
    """What they are on the server's `model`; raises what declaring them there does."""
    vectors = [_tensor(vector) for vector in told.vectors]
    changes = [_declared(change, vectors, model) for change in told.changes]
    return (*changes, *(model.capture(envoy_at(model.tree, each.path), each.name) for each in told.captures))


def _declared(change: Change, vectors: list[torch.Tensor], model: Declaring) -> Op:
    if change.vector >= len(vectors):
        raise ValueError(f"{change.kind} at {change.path!r}: there is no vector of the number {change.vector}")
    layer, vector, where = envoy_at(model.tree, change.path), vectors[change.vector], _heard(change.where)
    match change.kind:
        case "steer":
            return model.steer(layer, vector, scale=_scale(change), positions=where)
        case "ablate":
            return model.ablate(layer, vector, scale=_scale(change), positions=where)
        case "clamp":
            return model.clamp(layer, vector, min=change.low, max=change.high, positions=where)
        case "replace":
            return model.replace(layer, vector, positions=where)


def _scale(change: Change) -> float:
    if change.low is None:
        raise ValueError(f"{change.kind} at {change.path!r} has no scale")
    return change.low


def _told(number: float) -> float | None:
    return None if math.isinf(number) else number


def _where(positions: Positions) -> Any:
    if isinstance(positions, tuple):
        return Slice(*positions[1:]) if positions[:1] == ("slice",) else list(positions)  # type: ignore[arg-type]
    return positions


def _heard(where: Where) -> Any:
    return slice(where.start, where.stop, where.step) if isinstance(where, Slice) else where


def _tensor(vector: Vector) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, vector.dtype)
    if not vector.data or len(vector.data) % dtype.itemsize:
        raise ValueError(f"{len(vector.data)} bytes are no vector of {vector.dtype}")
    return OwnVector(b"", vector.dtype, vector.data, 0).tensor().to(dtype)
