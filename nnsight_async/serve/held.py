"""What a block that came as data holds at a time: the memory of its tensors, and the items of its lists."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch

MOST_ITEMS = 1 << 20
"""Items of all lists of a block."""

GRAIN = 1 << 20
"""Bytes by which a block may grow until all of them are looked at together."""


class Room(NamedTuple):
    """Bytes that the tensors of one block may take, and those of all blocks of a process."""

    own: int = 1 << 30
    together: int = 4 << 30


class Held:
    """Tensors that a block has read or computed, from then on until nobody refers to them: variables, items of lists,
    operands of what is being computed. Tensors that show the same memory count once.

    Looked at after a value has been computed, so a block may hold one value more than it has room for.
    """

    def __init__(self, room: Room) -> None:
        self.bytes = 0
        self._room = room
        self._tensors: dict[int, _Tensor] = {}
        self._shown: Counter[int] = Counter()
        """How many of the tensors show each storage."""
        self._sizes: dict[int, int] = {}
        self._gone: deque[_Tensor] = deque()
        """Which are no more; garbage may be collected in any thread."""
        self._looked_at = 0
        self._listed = 0
        self._listed_now = 0
        _running.add(self)

    def end(self) -> None:
        """The block has ended, whoever still looks at what it raised."""
        _running.discard(self)

    def begin(self) -> None:
        """A statement begins."""
        self._listed_now = 0

    def add(self, value: Any, *, read: bool = False) -> Any:
        """`value`, which has just been read or computed; `MemoryError` where it is too much.

        What is read may lie beside rows of other runs (`interleave/together.py`), which are not this block's.
        """
        if isinstance(value, torch.Tensor):
            self._add(value, read)
        elif isinstance(value, _LISTS):
            for part in _parts(value):
                if isinstance(part, _HOLDS):
                    self.add(part, read=read)
        return value

    def add_items(self, count: int, names: Iterable[Any]) -> None:
        """So many items have been put into lists; `names` are the values that the block's variables have."""
        self._listed += count
        self._listed_now += count
        if self._listed > 2 * MOST_ITEMS:  # and not at every item: it takes its time
            self._listed = items_in(names)
        elif self._listed_now <= MOST_ITEMS:
            return
        if max(self._listed, self._listed_now) > MOST_ITEMS:
            raise MemoryError(f"lists of more than {MOST_ITEMS:,} items; a block that is data may have no more")

    def _add(self, tensor: torch.Tensor, read: bool) -> None:
        self._forget()
        if id(tensor) in self._tensors:
            return
        storage: Any = torch.Tensor.untyped_storage(tensor)  # which asks no subclass for its own
        known = _Tensor(tensor, self._gone.append)
        known.number, known.storage = id(tensor), storage._cdata
        self._tensors[known.number] = known
        self._shown[known.storage] += 1
        if known.storage not in self._sizes:
            self._sizes[known.storage] = tensor.nbytes if read else storage.nbytes()
            self.bytes += self._sizes[known.storage]
            self._check()

    def _check(self) -> None:
        if self.bytes > self._room.own:
            raise MemoryError(
                f"a block with {self.bytes:,} bytes of tensors; one that is data may hold {self._room.own:,} at a time"
            )
        if self.bytes > self._looked_at + GRAIN:
            self._looked_at = self.bytes
            if sum(held.bytes for held in list(_running)) > self._room.together:
                raise MemoryError(
                    f"the blocks on this server hold more than {self._room.together:,} bytes of tensors together: "
                    "try again when others have ended, or hold less"
                )

    def _forget(self) -> None:
        while self._gone:
            gone = self._gone.popleft()
            del self._tensors[gone.number]
            self._shown[gone.storage] -= 1
            if not self._shown[gone.storage]:
                del self._shown[gone.storage]
                self.bytes -= self._sizes.pop(gone.storage)
                self._looked_at = min(self._looked_at, self.bytes)


class _Tensor(weakref.ref[torch.Tensor]):
    __slots__ = ("number", "storage")
    number: int
    storage: int


_LISTS = (list, tuple, dict)
_HOLDS = (torch.Tensor, *_LISTS)
_running: weakref.WeakSet[Held] = weakref.WeakSet()


def items_in(values: Iterable[Any]) -> int:
    """Items of lists in one another, those of each list once; no more are counted than would be too many."""
    waiting, seen, count = list(values), set[int](), 0
    while waiting and count <= MOST_ITEMS:
        value = waiting.pop()
        if isinstance(value, _LISTS) and id(cast("object", value)) not in seen:
            seen.add(id(cast("object", value)))
            parts = _parts(value)
            count += len(parts)
            waiting += [part for part in parts if isinstance(part, _LISTS)]
    return count


def _parts(value: Any) -> list[Any]:
    return list(value.values() if isinstance(value, dict) else value)
