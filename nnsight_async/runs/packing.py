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


class Flat:
    """The bytes of a flat tensor as they came, and what they are.

    Its tensors are copied out, so that who keeps one run's value does not keep those of all runs.
    """

    def __init__(self, kind: Kind, buffer: bytes | bytearray | memoryview, *, apart: bool = True) -> None:
        """`apart`: most of its tensors are asked for by `piece`. `ValueError` for a dtype that torch does not have."""
        name, self._shape = kind
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"unknown dtype {name!r}")
        self._dtype = dtype
        self._size = dtype.itemsize
        self._buffer = memoryview(buffer)
        self._apart = apart
        self._length = math.prod(self._shape or ())
        self._pieces: Sequence[torch.Tensor] | None = None

    def piece(self, offset: int, shape: list[int]) -> torch.Tensor:
        """The tensor at an offset, where all of them are asked for, one by one."""
        if self._pieces is None:
            self._pieces = self._all() if self._apart else ()
        if self._pieces:
            return self._pieces[offset // self._length]
        start, stop = offset * self._size, (offset + math.prod(shape)) * self._size
        if stop - start == len(self._buffer) and start != stop and not self._buffer.readonly:
            return torch.frombuffer(self._buffer, dtype=self._dtype).view(shape)
        return self.copy(offset, shape)

    def copy(self, offset: int, shape: list[int]) -> torch.Tensor:
        """The tensor at an offset, alone."""
        start, stop = offset * self._size, (offset + math.prod(shape)) * self._size
        if start == stop:
            return torch.empty(shape, dtype=self._dtype)
        return torch.frombuffer(bytearray(self._buffer[start:stop]), dtype=self._dtype).view(shape)

    def check(self, offset: int, shape: list[int], count: int) -> int:
        """The bytes of a tensor; raises unless so many of one shape follow each other from there on."""
        if type(offset) is not int or offset < 0:
            raise ValueError("an offset that cannot be one")
        if not all(type(length) is int and length > 0 for length in shape):
            torch.empty(shape, dtype=self._dtype, device="meta")  # there is none of some shapes
        size = math.prod(shape) * self._size
        if offset * self._size + count * size > len(self._buffer):
            raise ValueError("there is no value for each run")
        return size

    def forget(self) -> None:
        """No more is asked for by `piece`, and others keep this for what `copy` finds."""
        self._pieces = None

    @property
    def nbytes(self) -> int:
        return len(self._buffer)

    def _all(self) -> Sequence[torch.Tensor]:
        """All tensors of it, where they have one shape."""
        buffer, shape, length = self._buffer, self._shape, self._length
        if shape is None or not length or len(buffer) <= length * self._size or buffer.readonly:
            return ()
        # Two thirds of the time of copying each alone (torch 2.13).
        return cast("Any", torch.unbind_copy)(torch.frombuffer(buffer, dtype=self._dtype).view(-1, *shape))


class Unreadable(NamedTuple):
    """A flat tensor that did not come whole."""

    reason: str

    def piece(self, offset: int, shape: list[int]) -> torch.Tensor:
        raise ValueError(self.reason)

    def copy(self, offset: int, shape: list[int]) -> torch.Tensor:
        raise ValueError(self.reason)

    def check(self, offset: int, shape: list[int], count: int) -> int:
        raise ValueError(self.reason)

    def forget(self) -> None:
        pass

    @property
    def nbytes(self) -> int:
        return 0


def check_together(packed: list[Any], flats: Sequence[Flat | Unreadable], count: int) -> int:
    """The bytes that each run has in `flats`; raises any of several errors unless so many have saved this together."""
    match packed:
        case ["tensor", number, offset, shape]:
            return flats[number].check(offset, shape, count)
        case ["list" | "tuple", items]:
            return sum([check_together(item, flats, count) for item in items])
        case ["dict", items]:
            for key, _ in items:
                hash(unpack(key, flats))
            return sum([check_together(item, flats, count) for _, item in items])
        case _:
            unpack(packed, flats)
            return 0


def unpack(packed: list[Any], flats: Sequence[Flat | Unreadable], run: int | None = None) -> Any:
    """The value again, with memory of its own. Raises any of several errors for what `pack` did not make.

    `run`: whose value is wanted of those that have saved it together, counted from 0.
    """
    tag = packed[0]
    if tag == "tensor":
        _, number, offset, shape = packed
        if run is None:
            return flats[number].piece(offset, shape)
        return flats[number].copy(offset + run * math.prod(shape), shape)
    _, content = packed
    match tag:
        case "plain":
            return content
        case "list":
            return [unpack(item, flats, run) for item in content]
        case "tuple":
            return tuple(unpack(item, flats, run) for item in content)
        case "dict":
            return {unpack(key, flats): unpack(item, flats, run) for key, item in content}
        case "big":
            return int(content)
        case _:
            raise ValueError(f"unknown kind of value {tag!r}")
