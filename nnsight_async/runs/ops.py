"""Declared operations on the residual stream: data that the worker applies without running anything of the caller's."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch

from nnsight_async.errors import ShapeError
from nnsight_async.interleave.locations import expression

if TYPE_CHECKING:
    from collections.abc import Iterable

KEY = "nnsight_async"
"""Our entry in vLLM's `additional_config`, in which the layers of `op_sites=` come to the worker."""

FORMAT = 1
"""Part of it, and so of the key of vLLM's compilation cache: raise it when what is compiled for them changes."""

Kind = Literal["steer", "ablate", "clamp", "replace"]

Positions = str | tuple[int, ...] | tuple[str, int | None, int | None, int | None] | None
"""None, "prompt", "generated", token positions, or `("slice", start, stop, step)`."""

TOO_LARGE = (2.0 - 2.0**-24) * 2.0**127
"""The smallest number that is rounded to infinity in float32."""

FAR = 1 << 62
"""Beyond all positions."""

WHERE = 'None (all), "prompt", "generated", a token position, a list of them, or a slice'


class Vector(NamedTuple):
    """A vector on its way: its bytes, and what tells it from others."""

    digest: bytes
    dtype: str
    data: bytes
    width: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Vector:
        data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(hashlib.blake2b(data, digest_size=16, person=dtype.encode()).digest(), dtype, data, tensor.numel())

    def tensor(self) -> torch.Tensor:
        """It in float32."""
        return torch.frombuffer(bytearray(self.data), dtype=getattr(torch, self.dtype)).float()


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of a request on the stream after the layer at `path`. `low` and `high` are the scale, or limits."""

    kind: Kind
    path: str
    vector: Vector
    low: float
    high: float
    positions: Positions = None
    edit: int = 0
    """The number of the edit that it is of."""

    def __repr__(self) -> str:
        where = "" if self.positions is None else f" at positions {self.positions}"
        return f"<{self.kind} {expression(self.path)}{where}>"


@dataclass(frozen=True, slots=True)
class Capture:
    """The stream after the layer at `path` is saved under a name in every step."""

    path: str
    name: str

    def __repr__(self) -> str:
        return f"<capture {expression(self.path)} as {self.name!r}>"


Ops = tuple[Op | Capture, ...]


class ShippedOps(NamedTuple):
    """The operations of a request as plain data: each vector once, and by number in the operations that use it."""

    vectors: list[Vector]
    ops: list[tuple[Kind, str, int, float, float, Positions, int]]
    captures: list[tuple[str, str]]

    @classmethod
    def of(cls, ops: Iterable[Op | Capture]) -> ShippedOps | None:
        """None where there is nothing to ship."""
        vectors: dict[bytes, int] = {}
        shipped = cls([], [], [])
        for op in ops:
            if isinstance(op, Capture):
                shipped.captures.append((op.path, op.name))
                continue
            number = vectors.setdefault(op.vector.digest, len(vectors))
            if number == len(shipped.vectors):
                shipped.vectors.append(op.vector)
            shipped.ops.append((op.kind, op.path, number, op.low, op.high, op.positions, op.edit))
        return shipped if shipped.ops or shipped.captures else None

    def each(self) -> list[Op]:
        """What changes the stream, in its order."""
        vectors = [Vector(*vector) for vector in self.vectors]
        return [
            Op(kind, path, vectors[number], low, high, cast("Positions", _tuple(where)), edit)
            for kind, path, number, low, high, where, edit in self.ops
        ]


def _tuple(where: Any) -> Any:
    return tuple(cast("list[Any]", where)) if isinstance(where, list) else where


def ops_of(given: Any, what: str) -> Ops:
    """What `ops=[...]` holds; `TypeError` for anything but declared operations."""
    if given is None:
        return ()
    if isinstance(given, (list, tuple)):
        ops = tuple(cast("Iterable[Any]", given))
        if all(isinstance(op, (Op, Capture)) for op in ops):
            _check_names([op.name for op in ops if isinstance(op, Capture)], what)
            return ops
    raise TypeError(
        f"{what} got ops={given!r}: a list of what model.steer, ablate, clamp, replace and capture make is expected"
    )


def edit_ops(given: Any, *, alone: bool) -> tuple[Op, ...]:
    """What `ops=[...]` of an edit holds: at least one operation, and none that captures; `alone`, without a block."""
    found = ops_of(given, "edit()")
    if not alone:
        raise TypeError("edit() takes a block or ops=, not both: install two edits")
    if not found:
        raise ValueError("edit() got ops=[]: it would do nothing")
    changes = tuple(op for op in found if isinstance(op, Op))
    if len(changes) < len(found):
        raise TypeError("an edit captures with a block: `with model.edit() as (tracer, edit):`, and saves in it")
    return changes


def vector_of(given: Any, what: str, width: int | None) -> torch.Tensor:
    """A vector of the stream's width, on the CPU; `TypeError` for what is none, `ValueError` where it is not finite."""
    tensor = given if isinstance(given, torch.Tensor) else _from_numpy(given, what)
    if not tensor.is_floating_point():
        raise TypeError(f"{what} takes a vector of floats, not of {tensor.dtype}")
    tensor = tensor.detach().to("cpu")
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        tensor = tensor.to(torch.float32)
    if tensor.ndim != 1 or (width is not None and tensor.shape[0] != width):
        wanted = "the stream's width" if width is None else f"the stream's width, ({width},)"
        raise ShapeError(f"{what} takes one vector of {wanted}; the one given has the shape {tuple(tensor.shape)}")
    if not math.isfinite(largest(tensor)):
        raise ValueError(f"{what} got a vector that is not finite in float32")
    return tensor


def largest(vector: torch.Tensor) -> float:
    """The largest absolute value; NaN where there is one."""
    low, high = vector.aminmax() if len(vector) else (0.0, 0.0)  # in a quarter of the time of `abs().max()`
    return max(-float(low), float(high))


def unit(vector: torch.Tensor, what: str) -> torch.Tensor:
    """The direction of a vector; `ValueError` for one of zeros, which has none."""
    length = vector.double().norm()
    if not length:
        raise ValueError(f"{what} got a direction of zeros")
    return (vector.double() / length).float()


def number_of(given: Any, what: str, name: str) -> float:
    """A finite number."""
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TypeError(f"{what} got {name}={given!r}: a number is expected")
    if not abs(given) < TOO_LARGE:
        raise ValueError(f"{what} got {name}={given!r}: it has to be finite, in float32 too")
    return float(given)


def positions_of(given: Any, what: str) -> Positions:
    """`positions=` as data; `TypeError` and `ValueError` for what makes no sense whatever the prompt."""
    if given is None or (isinstance(given, str) and given in ("prompt", "generated")):
        return given
    if _whole(given):
        given = (given,)
    if isinstance(given, slice):
        bounds = (given.start, given.stop, given.step)
        if not all(bound is None or _whole(bound) for bound in bounds):
            raise TypeError(f"{what} got positions={given!r}: a slice of whole numbers is expected")
        if given.step is not None and given.step < 1:
            raise ValueError(f"{what} got positions={given!r}: the step has to be at least 1")
        return ("slice", *(None if bound is None else max(min(int(bound), FAR), -FAR) for bound in bounds))  # type: ignore[return-value]
    if isinstance(given, (list, tuple, range)):
        items = list(cast("Sequence[Any]", given))
        if not all(_whole(item) for item in items):
            raise TypeError(f"{what} got positions={given!r}: whole numbers are expected")
        if not items:
            raise ValueError(f"{what} got no positions: it would do nothing")
        if max(map(abs, items)) > FAR:
            raise ValueError(f"{what} got positions={given!r}: no prompt is as long as that")
        return tuple(map(int, items))
    raise TypeError(f"{what} got positions={given!r}: {WHERE} is expected")


def _check_names(names: list[str], what: str) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{what} got two captures named {twice!r}: give one of them another name")


def _whole(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)


def _from_numpy(given: Any, what: str) -> torch.Tensor:
    if hasattr(given, "__array_interface__"):
        return torch.as_tensor(given)
    raise TypeError(f"{what} takes a tensor or an array, not {type(given).__name__}")
