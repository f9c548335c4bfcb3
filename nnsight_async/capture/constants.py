"""Large tensors that blocks use: apart from the block, and named by what is in them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch

LARGE = 1 << 20
"""Bytes from which on a tensor does not travel inside its block."""

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Constant:
    """The bytes of a tensor as they were when a block was made: our own copy, `[bytes]`, on the host."""

    digest: bytes
    content: torch.Tensor

    @property
    def size(self) -> int:
        return self.content.numel()

    @property
    def buffer(self) -> memoryview:
        return _buffer(self.content)


_by_digest: WeakValueDictionary[bytes, Constant] = WeakValueDictionary()
_by_place: WeakValueDictionary[tuple[int, int], Constant] = WeakValueDictionary()
"""What was last found at an address."""


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is its bytes, its geometry and nothing else."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout == torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and not (tensor.__dict__ or tensor._backward_hooks)
    )


def span(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of the storage from the first that `tensor` shows to the last, flat; not copied."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.detach().as_strided((last + 1 if tensor.numel() else 0,), (1,))


def content_of(flat: torch.Tensor) -> bytes:
    return bytes(_buffer(_content(flat)))


def constant(flat: torch.Tensor) -> Constant:
    """`flat` as a constant; the same one for as long as its content is the same and anybody holds it.

    What lies at an address is compared with what was there before, because PyTorch does not count all changes
    (`.data`, NumPy), and only hashed if it differs: comparing takes a fraction of the time.
    """
    content = _content(flat)
    place = content.data_ptr(), content.numel()
    last = _by_place.get(place)
    if last is None or not _same(content, last.content):
        last = _by_place[place] = _copied(content)
    return last


def _copied(content: torch.Tensor) -> Constant:
    content = content.clone()
    digest = hashlib.sha256(_buffer(content)).digest()
    return _by_digest.setdefault(digest, Constant(digest, content))


def _content(flat: torch.Tensor) -> torch.Tensor:
    return flat.cpu().view(torch.uint8)


def _buffer(content: torch.Tensor) -> memoryview:
    return memoryview(content.numpy())  # pyright: ignore[reportArgumentType]  # says so from NumPy 2.1 on Python 3.12


def _same(content: torch.Tensor, other: torch.Tensor) -> bool:
    """Compared in the longest words that fit: eight bytes at a time take a tenth of the time of one (torch 2.13)."""
    fitting = content.storage_offset() | content.numel()
    word = next(word for word in WORDS if fitting % word.itemsize == 0)
    return torch.equal(content.view(word), other.view(word))
