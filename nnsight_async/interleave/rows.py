"""Rows of one run inside tensors that a whole batch shares: private copies out, checked replacements in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from nnsight_async.errors import IsolationError, ShapeError
from nnsight_async.interleave.together import Write, copies, joined

Path = tuple[Any, ...]
"""Where a tensor stands in the structure of a value."""

Written = list[tuple[Path, torch.Tensor]]
"""Rows to write, each with its path."""


class Span(NamedTuple):
    """Where the rows of one run lie in this forward pass.

    Rows `[start, stop)` are new to the run. The `replayed` rows before them are computed again after a preemption;
    `position` is the absolute token position of the first row of all, replayed ones included.
    """

    start: int
    stop: int
    replayed: int = 0
    position: int = 0

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(slots=True)
class Batch:
    """The rows of a phase: `rows` in all (padding included), shared by several requests or not."""

    rows: int
    shared: bool


class Private:
    """What one run was handed: its copy of a value, and by path the tensors in it with the changes dealt with so far.

    Copies are made outside inference mode, because only ordinary tensors count their in-place changes, from 0 on, or
    from 1 on where an inference tensor was cloned (`torch.Tensor._version`, torch 2.13).
    """

    __slots__ = ("tensors", "value", "versions")

    def __init__(self, value: Any = None) -> None:
        self.value = value
        self.tensors: dict[Path, torch.Tensor] = {}
        self.versions: dict[Path, int] = {}
        """Those that are not 0."""

    def add(self, path: Path, tensor: torch.Tensor, version: int | None = None) -> None:
        """`version`: that which it was handed out with, if it has been before."""
        self.tensors[path] = tensor
        if version is None:
            version = 0 if tensor.is_inference() else tensor._version
        if version:
            self.versions[path] = version

    def watches(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is one of the copies."""
        return any(tensor is mine for mine in self.tensors.values())

    def changed(self) -> bool:
        """Whether a copy was changed in place since `settle`."""
        versions = self.versions
        for path, tensor in self.tensors.items():  # noqa: SIM110  a generator takes twice as long
            if tensor._version != versions.get(path, 0):
                return True
        return False

    def settle(self) -> None:
        """The changes made so far have been dealt with."""
        self.versions = {path: tensor._version for path, tensor in self.tensors.items()}

    def untouched(self, path: Path, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is the copy that is at `path`, and was not changed since `settle`."""
        return tensor is self.tensors.get(path) and tensor._version == self.versions.get(path, 0)


class Slab:
    """The value at a location for the whole batch. Writing never touches the original tensors.

    Others may hold the same tensors (a residual stream, a module that returns its input), so the first write to a
    tensor replaces it by a clone; every later write of this event goes to that clone.
    """

    def __init__(
        self, value: Any, batch: Batch, place: object, spans: Sequence[Span], *, before: Slab | None = None
    ) -> None:
        """`before` is that of the same event, if others have written there."""
        self.value = value
        self._passed: Any = value if before is None else before._passed
        self.batch = batch
        self.place = place
        self._spans = spans
        self._source: Any = None
        self._copies: dict[int, dict[int, torch.Tensor]] = {}
        self._writes: dict[Path, list[Write]] = {}
        self._ours: set[int] = set()

    @property
    def graph(self) -> bool:
        """Whether what is handed out is part of a graph, and the forward pass has to go on from it, changed or not."""
        return False

    def take(self, span: Span) -> Private:
        """A private copy of the rows of `span`, in the structure of the value as it was when the first was taken."""
        if self._source is None:
            self._source = self.value
        private = Private()
        private.value = self._copy(self._source, span, private, ())
        return private

    def again(self, value: Any, rows: Mapping[Path, torch.Tensor]) -> Private:
        """Another copy of a private `value`, with `rows` in place of the tensors at their paths."""
        private = Private()
        with torch.inference_mode(False):
            private.value = copied(value, rows, private)
        return private

    def original(self, span: Span) -> Any:
        """The rows of `span` as they were before any block had changed them."""
        source = self.value if self._source is None else self._source
        with torch.inference_mode(False):
            return self._copy(source, span, Private(), ())

    def take_finished(self, span: Span) -> Private:
        """A private copy of the rows of `span` with all that `finish` has written."""
        self._source, self._copies = self.value, {}
        return self.take(span)

    def checked(self, span: Span, value: Any, private: Private | None, place: object = None) -> Written:
        """What writing `value` over this run's rows would write; `ShapeError` if it does not fit.

        `place`: what errors call the location, if something else.
        """
        written: Written = []
        own, self.place = self.place, place or self.place
        try:
            self._check(self.value, value, span, private, (), written)
        finally:
            self.place = own
        return written

    def put(self, start: int, written: Written, *, in_place: bool = False) -> None:
        """Have checked rows written at row `start` by the next `finish`.

        `in_place`: into the original tensors and at once, for everyone who holds them.
        """
        for path, rows in written:
            if in_place:
                original = part(self._passed, path)
                self._own(original, start, rows.shape[0]).copy_(rows)
                if path not in self._writes and part(self.value, path) is original:
                    continue
            self._writes.setdefault(path, []).append((start, rows))

    def finish(self) -> Any:
        """Write what was put, and return the value."""
        for path, writes in self._writes.items():
            self.value = self._replace(self.value, path, writes)
        self._writes.clear()
        return self.value

    def _copy(self, value: Any, span: Span, private: Private, path: Path) -> Any:
        if isinstance(value, torch.Tensor):
            return self._copy_tensor(value, span, private, path)
        if isinstance(value, (tuple, list)):
            items = enumerate(cast("list[Any]", value))
            return _rebuild(value, [self._copy(item, span, private, (*path, index)) for index, item in items])
        if isinstance(value, Mapping):
            pairs = cast("Mapping[Any, Any]", value).items()
            return {key: self._copy(item, span, private, (*path, key)) for key, item in pairs}
        return value

    def _copy_tensor(self, tensor: torch.Tensor, span: Span, private: Private, path: Path) -> torch.Tensor:
        found = self._copies.get(id(tensor))
        if found is None:
            found = self._copies[id(tensor)] = {} if self._whole(tensor) else copies(tensor, self._spans)
        copy = found.pop(span.start, None)
        if copy is None:  # a tensor without rows, or one that stands twice in the value
            with torch.inference_mode(False):
                copy = tensor.clone() if self._whole(tensor) else tensor[span.start : span.stop].clone()
        private.add(path, copy)
        return copy

    def _whole(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is not laid out by rows, and may be handed out because the run is alone in the step."""
        if tensor.ndim and tensor.shape[0] == self.batch.rows:
            return False
        if self.batch.shared and tensor.ndim:
            raise IsolationError(
                f"{self.place} holds a tensor of shape {tuple(tensor.shape)}, which is not laid out by the "
                f"{self.batch.rows} rows of this step; it mixes several requests and cannot be narrowed to one"
            )
        return True

    def _check(
        self,
        ours: Any,
        given: Any,
        span: Span,
        private: Private | None,
        path: Path,
        written: Written,
    ) -> None:
        if isinstance(ours, torch.Tensor):
            if not (isinstance(given, torch.Tensor) and private is not None and private.untouched(path, given)):
                written.append((path, self._checked_tensor(ours, given, span)))
        elif isinstance(ours, (tuple, list)):
            items = cast("list[Any]", ours)
            if not isinstance(given, (tuple, list)) or len(cast("list[Any]", given)) != len(items):
                raise ShapeError(f"{self.place} is {_outline(ours)}; it cannot be replaced by {_outline(given)}")
            for index, (mine, new) in enumerate(zip(items, cast("list[Any]", given), strict=True)):
                self._check(mine, new, span, private, (*path, index), written)
        elif isinstance(ours, Mapping):
            mapping = cast("Mapping[Any, Any]", ours)
            if not isinstance(given, Mapping) or set(cast("Mapping[Any, Any]", given)) != set(mapping):
                raise ShapeError(f"{self.place} is {_outline(ours)}; it cannot be replaced by {_outline(given)}")
            for key, mine in mapping.items():
                self._check(mine, given[key], span, private, (*path, key), written)
        elif given is not ours and not _same(given, ours):
            raise ShapeError(
                f"{self.place}: {_outline(ours)} cannot be replaced by {_outline(given)}: only tensors can be, "
                "everything else is shared by all requests of the step"
            )

    def _checked_tensor(self, ours: torch.Tensor, given: Any, span: Span) -> torch.Tensor:
        wanted = self._shape(ours, span)
        if not isinstance(given, torch.Tensor):
            raise ShapeError(f"{self.place} takes a tensor of shape {wanted}, not {_outline(given)}")
        if tuple(given.shape) != wanted:
            raise ShapeError(
                f"{self.place}: this run owns {span.rows} row{'s' * (span.rows != 1)} of it, so a replacement has "
                f"shape {wanted}; the one given has {tuple(given.shape)}"
            )
        if not torch.can_cast(given.dtype, ours.dtype):
            raise ShapeError(f"{self.place} holds {ours.dtype}; {given.dtype} does not convert to it safely")
        if given.layout != torch.strided or (given.is_meta and not ours.is_meta):
            raise ShapeError(f"{self.place} takes a dense tensor with data, not a {given.layout} one on {given.device}")
        return (given if self.graph else given.detach()).to(device=ours.device, dtype=ours.dtype)

    def _shape(self, ours: torch.Tensor, span: Span) -> tuple[int, ...]:
        """That of what can replace the rows of `span`."""
        return tuple(ours.shape) if self._whole(ours) else (span.rows, *ours.shape[1:])

    def _replace(self, value: Any, path: Path, writes: list[Write]) -> Any:
        if not path:
            return self._written(value, writes)
        return exchanged(value, path[0], self._replace(value[path[0]], path[1:], writes))

    def _written(self, tensor: torch.Tensor, writes: list[Write]) -> torch.Tensor:
        if id(tensor) not in self._ours:
            tensor = tensor.clone()
            self._ours.add(id(tensor))
        if self._whole(tensor):
            tensor.copy_(writes[-1][1])
        else:
            for start, rows in joined(writes):
                self._own(tensor, start, rows.shape[0]).copy_(rows)
        return tensor

    def _own(self, tensor: torch.Tensor, start: int, rows: int) -> torch.Tensor:
        """The rows of `tensor` from `start` on, to be written into."""
        return tensor[start : start + rows]


def copied(
    value: Any,
    rows: Mapping[Path, torch.Tensor],
    private: Private,
    path: Path = (),
    copy: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
) -> Any:
    """A copy of a private value, with `rows` in place of the tensors at their paths."""
    if isinstance(value, torch.Tensor):
        tensor = copy(rows.get(path, value))
        private.add(path, tensor)
        return tensor
    if isinstance(value, (tuple, list)):
        items = enumerate(cast("list[Any]", value))
        return _rebuild(value, [copied(item, rows, private, (*path, index), copy) for index, item in items])
    if isinstance(value, Mapping):
        pairs = cast("Mapping[Any, Any]", value).items()
        return {key: copied(item, rows, private, (*path, key), copy) for key, item in pairs}
    return value


def part(value: Any, path: Path) -> Any:
    for index in path:
        value = value[index]
    return value


def exchanged(value: Any, index: Any, item: Any) -> Any:
    """`value` with another item at `index`."""
    if isinstance(value, Mapping):
        return {**value, index: item}
    items = list(value)
    items[index] = item
    return _rebuild(value, items)


def _rebuild(like: Any, items: list[Any]) -> Any:
    """A tuple, named tuple or list like `like` with other items."""
    kind = type(like)
    if hasattr(kind, "_fields"):
        return kind(*items)
    return kind(items)


def _same(given: Any, ours: Any) -> bool:
    return type(given) is type(ours) and isinstance(ours, (int, float, str, bool)) and given == ours


def _outline(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        parts = ", ".join(_outline(item) for item in cast("list[Any]", value))
        return f"a {type(value).__name__} of {len(cast('list[Any]', value))} ({parts})"
    if isinstance(value, Mapping):
        return f"a dict with the keys {list(cast('Mapping[Any, Any]', value))}"
    return "None" if value is None else f"a {type(value).__name__}"
