"""Saved values as plain data beside a few flat tensors, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch._utils import _flatten_dense_tensors  # pyright: ignore[reportPrivateUsage]

from nnsight_async.errors import SaveError
from nnsight_async.interleave.together import Piece

Kind = tuple[str, list[int] | None]
"""The dtype of a flat tensor, and the shape of its tensors where all have the same."""


@dataclass(slots=True)
class _Group:
    """Tensors of one device and dtype."""

    number: int
    shape: torch.Size
    tensors: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    length: int = 0
    alike: bool = True
    """Whether all have that shape."""
    given: bool = True
    """Whether all were given away: nobody will change them."""


class Tensors:
    """The tensors of one message. Those of one device and dtype travel as one flat tensor.

    A message holds a row or two for each of many runs: joined, they take one copy, one transfer and one buffer.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[torch.device, torch.dtype, torch.layout], _Group] = {}
        self._wholes: dict[int, tuple[int, int, int, list[int]]] = {}

    @property
    def kinds(self) -> list[Kind]:
        """What the flat tensors are, in their order."""
        return [
            (str(dtype).removeprefix("torch."), list(group.shape) if group.alike else None)
            for (_, dtype, _), group in self._groups.items()
        ]

    def add(self, tensor: torch.Tensor, shape: torch.Size | None = None, *, given: bool = False) -> tuple[int, int]:
        """Take a tensor in, or several of that shape; returns the number of its flat tensor and its offset there, in
        elements."""
        shape = tensor.shape if shape is None else shape
        key = tensor.device, tensor.dtype, tensor.layout
        group = self._groups.get(key)
        if group is None:
            if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
                raise SaveError(f"only dense tensors can be saved, not one of {tensor.layout} on {tensor.device}")
            group = self._groups[key] = _Group(len(self._groups), shape)
        offset = group.length
        group.alike = group.alike and shape == group.shape
        group.given = group.given and given
        group.tensors.append(tensor)
        group.length += tensor.numel()
        return group.number, offset

    def add_piece(self, piece: Piece) -> tuple[int, int, list[int]]:
        """Take in what one run has of a tensor; returns the shape of the piece too."""
        found = self._wholes.get(id(piece.whole))
        if found is None:
            number, offset = self.add(piece.whole, piece.whole.shape[1:])
            shape = list(piece.whole.shape[1:])
            found = self._wholes[id(piece.whole)] = number, offset, math.prod(shape), shape
        number, offset, length, shape = found
        return number, offset + piece.number * length, shape

    def join(self) -> list[torch.Tensor]:
        """The flat tensors, on their devices. A block may go on to change what it saved: that is copied."""
        return [_flat(group) for group in self._groups.values()]


def _flat(group: _Group) -> torch.Tensor:
    if group.given and len(group.tensors) == 1:
        return group.tensors[0].reshape(-1).resolve_conj().resolve_neg()
    with torch.inference_mode():
        if len(group.tensors) == 1:
            flat = group.tensors[0].reshape(-1).clone()
        else:
            flat = _flatten_dense_tensors(group.tensors)  # a third of the time of `cat` on views (torch 2.11, 2.13)
        return flat.resolve_conj().resolve_neg()


def pack(value: Any, tensors: Tensors, *, together: bool = False) -> list[Any]:
    """`value` as plain data, with its tensors in `tensors`; `SaveError` for one that cannot be sent.

    `together`: what several runs have saved, each tensor with an item for each; what is returned is of the first run.
    """
    if type(value) is Piece:
        return ["tensor", *tensors.add_piece(value)]
    if isinstance(value, torch.Tensor):
        shape = value.shape[1:] if together else value.shape
        return ["tensor", *tensors.add(value, shape, given=together), list(shape)]
    if isinstance(value, (list, tuple)):
        tag = "list" if isinstance(value, list) else "tuple"
        return [tag, [pack(item, tensors, together=together) for item in cast("list[Any]", value)]]
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return ["dict", [[pack(key, tensors), pack(item, tensors, together=together)] for key, item in items]]
    return _pack_plain(value)


def _pack_plain(value: Any) -> list[Any]:
    """A scalar as what it is underneath: `numpy.float64` is a float, a member of an IntEnum an int."""
    if isinstance(value, int) and not isinstance(value, bool):
        return ["plain", int(value)] if value.bit_length() < 64 else ["big", str(int(value))]
    kind: Any = next((kind for kind in (float, str, bytes) if isinstance(value, kind)), None)
    return ["plain", value if kind is None else kind(value)]


class Flat(NamedTuple):
    """The bytes of a flat tensor as they came, and what they are.

    Its tensors are copied out, so that who keeps one run's value does not keep those of all runs.
    """

    dtype: torch.dtype
    size: int
    buffer: memoryview
    length: int
    """Of each of `pieces`, in elements."""
    pieces: Sequence[torch.Tensor]
    """All tensors of it, where they have one shape."""

    @classmethod
    def of(cls, kind: Kind, buffer: bytes | bytearray | memoryview) -> Flat:
        """`ValueError` for a dtype that torch does not have."""
        name, shape = kind
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"unknown dtype {name!r}")
        whole = memoryview(buffer)
        length, pieces = math.prod(shape or ()), ()
        if shape is not None and length and len(whole) > length * dtype.itemsize and not whole.readonly:
            # Two thirds of the time of copying each alone (torch 2.13).
            pieces = cast("Any", torch.unbind_copy)(torch.frombuffer(whole, dtype=dtype).view(-1, *shape))
        return cls(dtype, dtype.itemsize, whole, length, pieces)

    def piece(self, offset: int, shape: list[int]) -> torch.Tensor:
        """The tensor at an offset."""
        if self.pieces:
            return self.pieces[offset // self.length]
        start, stop = offset * self.size, (offset + math.prod(shape)) * self.size
        if start == stop:
            return torch.empty(shape, dtype=self.dtype)
        whole = stop - start == len(self.buffer) and not self.buffer.readonly
        own = self.buffer if whole else bytearray(self.buffer[start:stop])
        return torch.frombuffer(own, dtype=self.dtype).view(shape)

    def column(self, offset: int, shape: list[int], count: int) -> Sequence[torch.Tensor]:
        """So many tensors of one shape that follow each other."""
        length = math.prod(shape)
        if self.pieces and length == self.length:
            first = offset // length
            return self.pieces[first : first + count]
        return [self.piece(offset + index * length, shape) for index in range(count)]


class Unreadable(NamedTuple):
    """A flat tensor that did not come whole."""

    reason: str

    def piece(self, offset: int, shape: list[int]) -> torch.Tensor:
        raise ValueError(self.reason)

    def column(self, offset: int, shape: list[int], count: int) -> Sequence[torch.Tensor]:
        raise ValueError(self.reason)


def unpack_together(packed: list[Any], flats: Sequence[Flat | Unreadable], count: int) -> Sequence[Any]:
    """The values of so many runs that have saved it together; see `unpack`."""
    match packed:
        case ["tensor", number, offset, shape]:
            found = flats[number].column(offset, shape, count)
            if len(found) != count:
                raise ValueError("there is no value for each run")
            return found
        case ["list" | "tuple" as tag, items]:
            rows = _rows([unpack_together(item, flats, count) for item in items], count)
            return list(map(list, rows)) if tag == "list" else rows
        case ["dict", items]:
            keys = [unpack(key, flats) for key, _ in items]
            rows = _rows([unpack_together(item, flats, count) for _, item in items], count)
            return [dict(zip(keys, row, strict=True)) for row in rows]
        case _:
            return [unpack(packed, flats)] * count


def _rows(columns: list[Sequence[Any]], count: int) -> list[tuple[Any, ...]]:
    return list(zip(*columns, strict=True)) if columns else [()] * count


def unpack(packed: list[Any], flats: Sequence[Flat | Unreadable]) -> Any:
    """The value again, with memory of its own. Raises any of several errors for what `pack` did not make."""
    tag = packed[0]
    if tag == "tensor":
        _, number, offset, shape = packed
        return flats[number].piece(offset, shape)
    _, content = packed
    match tag:
        case "plain":
            return content
        case "list":
            return [unpack(item, flats) for item in content]
        case "tuple":
            return tuple(unpack(item, flats) for item in content)
        case "dict":
            return {unpack(key, flats): unpack(item, flats) for key, item in content}
        case "big":
            return int(content)
        case _:
            raise ValueError(f"unknown kind of value {tag!r}")
