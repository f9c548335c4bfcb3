"""The deeds of a plan, done to the rows of many runs at once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from nnsight_async.interleave.plan import Change, Number, Save, Slice, as_key
from nnsight_async.interleave.rows import Path, part

if TYPE_CHECKING:
    from nnsight_async.interleave.plan import Deed, Key
    from nnsight_async.interleave.together import Places
    from nnsight_async.interleave.views import View

IN_PLACE: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.iadd, "-": operator.isub, "*": operator.imul, "/": operator.itruediv,
}  # fmt: skip


PLAIN = (str, bytes, int, float, type(None))
"""What keys of a dict are the same for every run."""


class Odd(Exception):  # noqa: N818 -- nothing is wrong
    """Something that is not done to several runs at once."""


class Operands:
    """The tensors of several runs as one, kept for the next step of the same runs."""

    def __init__(self) -> None:
        self._runs: list[Any] = []
        self._joined: dict[int, torch.Tensor] = {}

    def of(self, runs: list[Any], index: int, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, bool]:
        """That at `index` of all runs, and whether it has an item for each; `Odd` where they do not fit together."""
        if runs != self._runs:
            self._runs, self._joined = list(runs), {}
        found = self._joined.get(index)
        if found is None:
            found = self._joined[index] = _joined(tensors)
        return found, found is not tensors[0]


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    first = tensors[0]
    if all(_same(first, tensor) for tensor in tensors[1:]):
        return first
    if not first.ndim or any((t.shape, t.dtype, t.device) != (first.shape, first.dtype, first.device) for t in tensors):
        raise Odd
    return torch.stack(list(tensors))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or (
        one.data_ptr() == other.data_ptr()
        and (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    )


class Bundle:
    """The rows of several runs that have as many each, as tensors `[runs, rows, ...]`.

    Everything that is not of the common kind is `Odd`, and nothing has been done then that anybody could see.
    """

    def __init__(self, value: Any, rows: int, places: Places) -> None:
        """`value` passes, with `rows` rows in all."""
        self._value = value
        self._rows = rows
        self._places = places
        self._tensors: dict[Path, torch.Tensor] = {}
        self._given: set[Path] = set()
        self.changed: dict[Path, None] = {}
        """Paths of tensors that are to be written."""
        self.saved: list[tuple[Save, Any]] = []
        """With tensors in which each run has an item."""

    def do(self, deeds: Sequence[Deed], operand: Callable[[int], tuple[torch.Tensor, bool]]) -> None:
        """Do all of it."""
        for deed in deeds:
            if isinstance(deed, Save):
                self.saved.append((deed, _own(self._seen(deed.reading.view, deed.keys))))
            elif isinstance(deed, Change):
                self._change(deed, operand)

    def written(self, path: Path) -> torch.Tensor:
        """`[runs, rows, ...]`, to be written."""
        return self._tensors[path]

    # -- reading ---------------------------------------------------------------------------------------------------

    def _seen(self, view: View | None, keys: Sequence[Key]) -> Any:
        if view is not None:
            return _item(_laid_out(view.get(self._structure(self._value, ())), len(self._places)), keys)
        path, keys = self._path(keys)
        value = part(self._value, path)
        if isinstance(value, torch.Tensor):
            self._given.add(path)
            return _item(self._tensor(path), keys)
        if keys:
            raise Odd
        return self._structure(value, path)

    def _path(self, keys: Sequence[Key]) -> tuple[Path, Sequence[Key]]:
        """Which keys lead to a tensor, and those that are left."""
        value, count = self._value, 0
        while count < len(keys) and not isinstance(value, torch.Tensor):
            if not isinstance(value, (tuple, list, Mapping)) or isinstance(keys[count], (tuple, Slice)):
                raise Odd
            value = value[keys[count]]
            count += 1
        return tuple(keys[:count]), keys[count:]

    def _structure(self, value: Any, path: Path) -> Any:
        if isinstance(value, torch.Tensor):
            self._given.add(path)
            return self._tensor(path)
        if type(value) is tuple or type(value) is list:
            items: Any = value
            return type(value)([self._structure(item, (*path, index)) for index, item in enumerate(items)])
        if type(value) is dict:
            pairs: Any = value
            if not all(isinstance(key, PLAIN) for key in pairs):  # a tensor would be that of all runs
                raise Odd
            return {key: self._structure(item, (*path, key)) for key, item in pairs.items()}
        if value is None:
            return None
        raise Odd

    def _tensor(self, path: Path) -> torch.Tensor:
        found = self._tensors.get(path)
        if found is None:
            tensor = part(self._value, path)
            if not tensor.ndim or tensor.shape[0] != self._rows or tensor.layout is not torch.strided:
                raise Odd
            found = self._tensors[path] = self._places.gathered(tensor)
        return found

    # -- changing --------------------------------------------------------------------------------------------------

    def _change(self, change: Change, operand: Callable[[int], tuple[torch.Tensor, bool]]) -> None:
        view = change.reading.view
        if view is not None:
            self._change_view(view, change, operand)
            return
        path, keys = self._path(change.keys)
        if not isinstance(part(self._value, path), torch.Tensor) or (not keys and not change.assigned):
            raise Odd
        tensor = self._tensor(path)
        if path in self._given:
            tensor = self._tensors[path] = tensor.clone()
            self._given.discard(path)
        _put(tensor, keys, change, operand)
        self.changed[path] = None

    def _change_view(self, view: View, change: Change, operand: Callable[[int], tuple[torch.Tensor, bool]]) -> None:
        if view.shared(self._value):
            raise Odd
        before = self._structure(self._value, ())
        seen = _laid_out(view.get(before), len(self._places)).clone()
        _put(seen, change.keys, change, operand)
        for path, tensor in _exchanged(before, view.put(before, seen), ()):
            self._tensors[path] = tensor
            self.changed[path] = None


def _own(value: Any) -> Any:
    """The value with tensors of its own: what is saved twice comes home twice, and each is the caller's to change."""
    if isinstance(value, torch.Tensor):
        return value[...]
    if isinstance(value, (tuple, list)):
        items: Any = value
        return type(value)(map(_own, items))
    if isinstance(value, dict):
        pairs: Any = value
        return {key: _own(item) for key, item in pairs.items()}
    return value


def _put(tensor: torch.Tensor, keys: Sequence[Key], change: Change, operand: Callable[[int], Any]) -> None:
    place = _item(tensor, keys)
    value = change.operand.value if isinstance(change.operand, Number) else _fitting(place, *operand(change.operand))
    if change.sign:
        IN_PLACE[change.sign](place, value)
    else:
        place[...] = value


def _fitting(place: torch.Tensor, value: torch.Tensor, each: bool) -> torch.Tensor:
    """The operand in the shape in which each run's goes to its own item."""
    shape = value.shape[1:] if each else value.shape
    axes = place.ndim - 1 - len(shape)
    if place.ndim == 1 and value.dtype != place.dtype:  # a number of each run: PyTorch computes with numbers otherwise
        raise Odd
    if axes < 0 or torch.broadcast_shapes(place.shape[1:], shape) != place.shape[1:] or value.device != place.device:
        raise Odd
    return value.view(value.shape[0], *(1 for _ in range(axes)), *shape) if each else value


def _exchanged(before: Any, after: Any, path: Path) -> list[tuple[Path, torch.Tensor]]:
    """The tensors that are others in `after`, with their paths."""
    if before is after:
        return []
    if isinstance(before, torch.Tensor):
        if not isinstance(after, torch.Tensor) or (after.shape, after.dtype) != (before.shape, before.dtype):
            raise Odd
        return [(path, after)]
    items = list(before.items() if isinstance(before, Mapping) else enumerate(before))
    return [each for key, item in items for each in _exchanged(item, after[key], (*path, key))]


def _laid_out(seen: Any, runs: int) -> torch.Tensor:
    if not isinstance(seen, torch.Tensor) or not seen.ndim or seen.shape[0] != runs:
        raise Odd
    return seen


def _item(tensor: torch.Tensor, keys: Sequence[Key]) -> torch.Tensor:
    """`tensor[keys[0]][keys[1]]...` of every run."""
    for key in keys:
        parts = key if type(key) is tuple else (key,)
        tensor = tensor[(slice(None), *map(as_key, parts))]
    return tensor
