"""Operations inside modules: while a block may ask for one, the module's own forward runs with its calls reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from nnsight_async.errors import LocationError, UnreadableError
from nnsight_async.interleave.functions import Call, reach
from nnsight_async.interleave.instrument import Instrument, Report, instrument
from nnsight_async.interleave.locations import Location, expression
from nnsight_async.interleave.operations import Operation, surely_passed
from nnsight_async.interleave.refusals import missing, unreadable

Names = Mapping[str, Operation]


class Listener(Protocol):
    """What is told of values that pass, and of operations that turn out not to be there."""

    running: bool
    """Whether a block has its turn, and applies modules itself."""

    @property
    def waiting(self) -> Mapping[Location, Any]: ...

    def fire(self, event: Location, value: Any) -> Any: ...
    def refuse(self, event: Location, error: Exception) -> None: ...


class Inside:
    """Makes the reporting forms of forwards and of functions called inside them, and knows which are needed now."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._watched: Counter[str] = Counter()
        self._entered: Counter[tuple[str, str]] = Counter()
        self._forwards: dict[str, Call | UnreadableError] = {}
        self._reports: dict[tuple[str, str, int], Report] = {}
        self._names: dict[tuple[str, str], Names] = {}

    @property
    def watched(self) -> int:
        """How many modules have their operations reported when they are called now."""
        return len(self._watched)

    def watch(self, path: str) -> None:
        """Someone may ask for operations of the module at `path`."""
        self._watched[path] += 1

    def rest(self, path: str) -> None:
        """One who might have asked does no more."""
        _less(self._watched, path)

    def want(self, event: Location) -> None:
        """Someone waits at an operation."""
        self.watch(event.path)
        for outer in _outer(event.operation):
            self._entered[event.path, outer] += 1

    def release(self, event: Location) -> None:
        """One who waited at an operation does no more."""
        self.rest(event.path)
        for outer in _outer(event.operation):
            _less(self._entered, (event.path, outer))

    def forward(self, path: str, forward: Call) -> Call:
        """What to call in the place of the `forward` of the module at `path`."""
        if path not in self._watched:
            return forward
        reporting = self._forward(path, forward)
        return forward if isinstance(reporting, UnreadableError) else reporting

    def check(self, event: Location, forward: Call) -> None:
        """`UnreadableError` or `LocationError` if the operation cannot come, as far as the forward alone tells."""
        reporting = self._forward(event.path, forward)
        if isinstance(reporting, UnreadableError):
            raise UnreadableError(unreadable(f"{expression(event.path)}.source", reporting))
        names = self._names[event.path, ""]
        first, _, _ = event.operation.partition("/")
        if first not in names:
            raise LocationError(missing(f"{expression(event.path)}.source", first, tuple(names)))

    def passed(self, event: Location, reached: Location | None) -> bool:
        """Whether a call that has got to the operation `reached` has surely gone by the operation `event`."""
        if reached is None or reached.path != event.path:
            return False
        return surely_passed(event, reached, (self._way(event), self._way(reached)))

    def _way(self, event: Location) -> Sequence[Operation]:
        """The operations that lead to `event`, as far as they are known."""
        found: list[Operation] = []
        prefix = ""
        for name in event.operation.split("/"):
            operation = self._names.get((event.path, prefix), {}).get(name)
            if operation is None:
                break
            found.append(operation)
            prefix = f"{prefix}/{name}" if prefix else name
        return found

    def _forward(self, path: str, forward: Call) -> Call | UnreadableError:
        known = self._forwards.get(path)
        if known is None:
            known = self._forwards[path] = self._reported(path, "", forward)
        return known

    def _reported(self, path: str, prefix: str, callee: object) -> Call | UnreadableError:
        try:
            function, _, put = reach(callee)
            tool = instrument(function)
        except UnreadableError as error:
            return error.with_traceback(None)
        self._names[path, prefix] = tool.operations
        key = (path, prefix, id(tool))
        report = self._reports.get(key)
        if report is None:
            report = self._reports[key] = self._report(path, prefix, tool)
        return put(tool.reporting(function, report))

    def _report(self, path: str, prefix: str, tool: Instrument) -> Report:
        names = [f"{prefix}/{name}" if prefix else name for name in tool.operations]
        places = [(Location(path, "inputs", name), Location(path, "output", name), (path, name)) for name in names]
        listener, entered, enter = self._listener, self._entered, self._enter

        def report(number: int, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
            entry, exit_, key = places[number]
            if entry in listener.waiting:
                args, kwargs = listener.fire(entry, (args, kwargs))
            if entered and key in entered:
                callee = enter(entry, callee)
            output = callee(*args, **kwargs)
            if exit_ in listener.waiting:
                output = listener.fire(exit_, output)
            return output

        return report

    def _enter(self, outer: Location, callee: Call) -> Call:
        """The reporting form of what is called at `outer`; those who wait inside for what is not there are told."""
        reporting = self._reported(outer.path, outer.operation, callee)
        where = f"{str(outer).removesuffix(f'.{outer.kind}')}.source"
        if isinstance(reporting, UnreadableError):
            for event, _ in self._inside(outer):
                self._listener.refuse(event, UnreadableError(unreadable(where, reporting)))
            return callee
        names = tuple(self._names[outer.path, outer.operation])
        for event, name in self._inside(outer):
            if name not in names:
                self._listener.refuse(event, LocationError(missing(where, name, names)))
        return reporting

    def _inside(self, outer: Location) -> list[tuple[Location, str]]:
        start = f"{outer.operation}/"
        waiting = [event for event in self._listener.waiting if event.path == outer.path]
        return [
            (event, event.operation.removeprefix(start).partition("/")[0])
            for event in waiting
            if event.operation.startswith(start)
        ]


def _outer(operation: str) -> list[str]:
    """The operations around a nested one: `a` and `a/b` for `a/b/c`."""
    parts = operation.split("/")
    return ["/".join(parts[:length]) for length in range(1, len(parts))]


def _less(counts: Counter[Any], key: Any) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
