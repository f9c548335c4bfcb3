"""Places where a CUDA graph stops for blocks: recorded once, passed in every replay (vLLM 0.33)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

from nnsight_async.errors import IsolationError, UnsupportedError

if TYPE_CHECKING:
    from nnsight_async.interleave.interleaver import Interleaver
    from nnsight_async.interleave.locations import Location

Path = tuple[Any, ...]
"""Where a tensor stands in the structure of a value."""


class Stops:
    """The taps of an engine, while graphs are recorded and when they are replayed.

    At a tap the graph goes on with a copy of the value: what blocks write must reach no one but whoever takes it.
    """

    def __init__(self, interleaver: Interleaver, taps: Iterable[Location]) -> None:
        self._interleaver = interleaver
        self._taps = tuple(taps)
        self._recording = False
        self._rows = 0
        self._stream: Any = None
        self._open: dict[Location, list[list[tuple[Path, torch.Tensor, torch.Tensor]]]] = defaultdict(list)
        """By the end of a call: the arguments of those that go on, each with a copy."""
        self._written: set[tuple[Location, Path]] = set()
        """Arguments that their callee writes into."""
        self._by_rows: dict[tuple[Location, Path], set[bool]] = defaultdict(set)

    @contextmanager
    def reported(self) -> Generator[None]:
        """Have modules report to what is being recorded, at the taps, and at the ends of calls whose entry is one."""
        self._recording = True
        try:
            with reporting(self._interleaver, {*self._taps, *map(_end, filter(_at_entry, self._taps))}, self._report):
                yield
        finally:
            self._recording = False
            self._open.clear()

    def begin(self, rows: int) -> None:
        """What is recorded next is a pass over so many rows, on the stream that is current."""
        self._rows, self._stream = rows, torch.cuda.current_stream()

    def warm(self) -> None:
        """What comes next is the pass that is recorded."""

    def _report(self, event: Location, value: Any) -> Any:
        """A value passes while graphs are recorded; returns what the pass goes on with."""
        from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture

        capture = BreakableCUDAGraphCapture.current()
        if capture is None:
            return self._warm_up(event, value)
        return self.stop(event, value, capture.add_eager)

    def _warm_up(self, event: Location, value: Any) -> Any:
        if torch.cuda.current_stream() != self._stream:
            raise UnsupportedError(
                f"taps: {event} passes on a stream of its own, where a graph cannot stop; tap what is made of it "
                "(shared experts: VLLM_DISABLE_SHARED_EXPERTS_STREAM=1)"
            )
        return self.watch(event, value)

    def watch(self, event: Location, value: Any) -> Any:
        """Find out into which of its arguments what is called at `event` writes.

        It is called with noise: its own memory may hold what it writes already, from a pass like this one.
        """
        if event.at_entry:
            opened: list[tuple[Path, torch.Tensor, torch.Tensor]] = []

            def noise(path: Path, tensor: torch.Tensor) -> torch.Tensor:
                if not self._has_rows(tensor):
                    return tensor
                given = torch.randn_like(tensor.float()).to(tensor) if tensor.is_floating_point() else tensor.clone()
                opened.append((path, given, given.clone()))
                return given

            value = each_tensor(value, noise)
            self._open[_end(event)].append(opened)
        elif self._open[event]:
            entry = event._replace(kind="inputs")
            opened = self._open[event].pop()
            self._written.update((entry, path) for path, given, before in opened if not _same_bytes(given, before))
        return value

    def stop(self, event: Location, value: Any, interrupt: Callable[[Callable[[], None]], object]) -> Any:
        """Have the graph that is being recorded stop here; returns what it goes on with.

        The memory of its tensors is that of the graph, which gives it to others when nobody in the graph needs it any
        more: here they are referred to weakly.
        """
        if not event.at_entry and self._open[event]:
            for _, argument, copy in self._open[event].pop():  # the caller sees what was written
                argument.copy_(copy)
        if event not in self._taps:
            return value
        for path, tensor in _tensors(value):
            if tensor.ndim:
                self._by_rows[event, path].add(tensor.shape[0] == self._rows)
        copies: dict[Path, torch.Tensor] = {}
        copied = each_tensor(
            value, lambda path, tensor: copies.setdefault(path, tensor.clone()) if self._has_rows(tensor) else tensor
        )
        if event.at_entry:
            written = [path for path in copies if (event, path) in self._written]
            self._open[_end(event)].append([(path, _at(value, path), copies[path]) for path in written])
        passing = each_tensor(value, lambda _, tensor: _weak(tensor))
        going_on = {path: _weak(copy) for path, copy in copies.items()}
        interrupt(lambda: self._pass(event, passing, going_on))
        return copied

    def _has_rows(self, tensor: torch.Tensor) -> bool:
        return bool(tensor.ndim) and tensor.shape[0] == self._rows

    def _pass(self, event: Location, value: Any, going_on: Mapping[Path, torch.Tensor]) -> None:
        """A replayed graph has stopped."""
        if self._recording or event not in self._interleaver.waiting:
            return
        for path in going_on:
            if len(self._by_rows[event, path]) > 1:  # by chance it has as many as there are rows in this graph
                self._interleaver.refuse(event, IsolationError(f"{event} holds a tensor that is not laid out by rows"))
                return
        after = self._interleaver.fire(event, value)
        for path, target in going_on.items():
            new = _at(after, path)
            # At an entry, blocks may also have written in place, for all who hold the argument.
            if event.at_entry or new is not _at(value, path):
                target.copy_(new)


@contextmanager
def reporting(
    listener: Interleaver, events: Collection[Location], report: Callable[[Location, Any], Any]
) -> Generator[None]:
    """Have what passes at `events` go to `report`, and to no block."""
    listener.fire, listener.refuse = report, _raise  # type: ignore[method-assign]
    for event in events:
        dict.__setitem__(listener.waiting, event, [])
        listener.sites.want(event)
    try:
        yield
    finally:
        for event in events:
            dict.__delitem__(listener.waiting, event)
            listener.sites.release(event)
        del listener.fire, listener.refuse


def _at_entry(tap: Location) -> bool:
    return tap.at_entry


def _end(entry: Location) -> Location:
    return entry._replace(kind="output")


def _raise(event: Location, error: Exception) -> None:
    raise error


def _weak(tensor: torch.Tensor) -> torch.Tensor:
    from vllm.utils.torch_utils import weak_ref_tensor

    return weak_ref_tensor(tensor) if tensor.is_cuda else tensor


def _same_bytes(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal, NaN included."""
    ours, theirs = (each.contiguous().reshape(-1).view(torch.uint8) for each in (tensor, other))
    return torch.equal(ours, theirs)


def _tensors(value: Any) -> list[tuple[Path, torch.Tensor]]:
    found: list[tuple[Path, torch.Tensor]] = []
    each_tensor(value, lambda path, tensor: found.append((path, tensor)) or tensor)
    return found


def _at(value: Any, path: Path) -> Any:
    for index in path:
        value = value[index]
    return value


def each_tensor(value: Any, function: Callable[[Path, torch.Tensor], torch.Tensor], path: Path = ()) -> Any:
    """`value` with every tensor replaced by what `function` makes of it; what holds none is left as it is."""
    if isinstance(value, torch.Tensor):
        return function(path, value)
    if isinstance(value, Mapping):
        pairs = cast("Mapping[Any, Any]", value)
        changed = {key: each_tensor(item, function, (*path, key)) for key, item in pairs.items()}
        return value if all(changed[key] is item for key, item in pairs.items()) else changed
    if isinstance(value, (tuple, list)):
        items = cast("list[Any]", value)
        new = [each_tensor(item, function, (*path, index)) for index, item in enumerate(items)]
        if all(one is item for one, item in zip(new, items, strict=True)):
            return value
        return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
    return value
