"""What a block of few forms does on a model: the plan that takes its place, where there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

import greenlet
import torch

from nnsight_async.capture.plain import PLAIN, assigned
from nnsight_async.interleave.context import BlockGreenlet
from nnsight_async.interleave.context import save as save_function
from nnsight_async.interleave.locations import Location
from nnsight_async.interleave.plan import (
    ONCE,
    Change,
    Deed,
    Number,
    Phase,
    Plan,
    Planned,
    Read,
    Save,
    Stage,
    one_of,
)
from nnsight_async.interleave.tracer import Tracer
from nnsight_async.tree.envoy import Envoy
from nnsight_async.tree.expressions import Expressions, Forbidden, NoPlan, Sight

if TYPE_CHECKING:
    from nnsight_async.capture.plain import Form
    from nnsight_async.interleave.block import BlockRun
    from nnsight_async.interleave.interleaver import Interleaver
    from nnsight_async.interleave.views import View

MOST = 500
"""Deeds that a plan may have, turns of the loops that lead to them included."""


def plan_of(run: BlockRun, interleaver: Interleaver) -> Planned | None:
    """What takes the place of the block of `run`; None where that has to run, because of what it does or names."""
    program: Any = run.program
    holder = program if isinstance(program, FunctionType) else type(program)
    if PLAIN not in vars(holder):  # so that nothing of the user's is asked
        return None
    forms = getattr(program, PLAIN)
    if forms is None:
        return None

    def make(_: Any) -> Planned | None:
        try:
            return _Maker(run, interleaver).make(forms)
        except Exception:  # of whatever kind: the block will raise it, where it has to be raised
            return None

    here = BlockGreenlet(make, run)  # who asks a module for its stream asks the block that runs
    here.parent = greenlet.getcurrent()
    return here.switch(None)


class _List:
    """A list that has been saved, under this name."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Maker(Expressions):
    """Goes through a block once for each of its phases."""

    def __init__(self, run: BlockRun, interleaver: Interleaver) -> None:
        self._interleaver = interleaver
        self._tree = interleaver.model.tree
        self._tracer = run.tracer
        self._operands: list[torch.Tensor] = []
        self._filename, self._function, self._names = _beginning(run.program, interleaver.model, run.tracer)
        self._epoch = 0
        self._followed: set[str] = set()
        """Names of lists."""
        self._readings = 0
        self._deeds = 0
        self._begin()

    def make(self, forms: Sequence[Form]) -> Planned:
        loop = forms[-1] if forms and forms[-1][0] == "steps" else None
        self._run(forms if loop is None else forms[:-1])
        if loop is None:
            plan = Plan(self._phase(), Phase(), ONCE, self._filename, self._function)
            return Planned(one_of(plan), tuple(self._operands), plan.last())
        _, line, name, tracer, steps, body = loop
        if self._value(tracer) is not self._tracer:
            raise NoPlan
        start, stop, stride = self._steps(steps)
        alone = self._phase()
        changed = assigned((loop,))
        kept = {known: value for known, value in self._names.items() if known not in changed}
        first, followed = alone, frozenset(self._followed)
        at_once = start == 0 and stop != 0
        if at_once and alone.stages:  # in the same step as what stands before the loop
            self._names = {**kept, name: Forbidden()}
            self._run(body)
            first = self._phase()
        self._begin()
        self._followed = {*followed}
        self._names = {**kept, name: Forbidden()}
        self._run(body)
        later = self._phase()
        if at_once and not alone.stages:
            first = Phase(later.stages, (*alone.lists, *later.lists))
        plan = Plan(first, later, (start, stop, stride), self._filename, self._function, line)
        return Planned(one_of(plan), tuple(self._operands), plan.last())

    def _begin(self) -> None:
        """A phase begins."""
        self._epoch += 1
        self._stages: list[tuple[Location, list[Deed]]] = []
        self._lists: list[str] = []
        self._saved: set[str] = set()
        self._clock = -1
        self._age = 0
        self._readings = 0

    def _phase(self) -> Phase:
        return Phase(tuple(Stage(event, tuple(deeds)) for event, deeds in self._stages), tuple(self._lists))

    def _steps(self, key: Form) -> tuple[int, int | None, int]:
        if key[0] != "slice":
            number = self._integer(self._value(key))
            if number < 0:
                raise NoPlan
            return number, number + 1, 1
        start, stop, stride = (None if part is None else self._integer(self._value(part)) for part in key[1:])
        if (start or 0) < 0 or (stop or 0) < 0 or (stride is not None and stride < 1):
            raise NoPlan
        return start or 0, stop, stride or 1

    # -- statements ------------------------------------------------------------------------------------------------

    def _run(self, forms: Sequence[Form]) -> None:
        for form in forms:
            getattr(self, f"_{form[0]}")(*form[1:])

    def _let(self, line: int, name: str, value: Form) -> None:
        self._names[name] = self._value(value, line)

    def _list(self, line: int, name: str, called: str | None) -> None:
        if called is not None and called in self._names:
            raise NoPlan
        if len(self._saved) > len(self._lists):  # something that comes home before it
            raise NoPlan
        self._take(name)
        self._followed.add(name)
        self._lists.append(name)
        self._names[name] = _List(name)

    def _append(self, line: int, name: str, value: Form) -> None:
        into = self._names[name]
        if not isinstance(into, _List):
            raise NoPlan
        reading, keys = self._now(self._value(value, line))
        if reading.view is None and self._stages[-1][0].kind == "inputs" and len(keys) < 2:
            raise NoPlan  # it holds a dict, and is followed from step to step
        self._add(Save(reading, keys, into.name, True, line))

    def _save(self, line: int, saver: Form | None, name: Form, value: Form, assigned: str | None) -> None:
        if saver is not None:
            kind, function = saver
            found = self._value(function)
            if found is not (self._tracer if kind == "method" else save_function):
                raise NoPlan
        sight, called = self._value(value, line), self._value(name)
        if type(called) is not str or not called.isprintable():
            raise NoPlan
        self._take(called)
        reading, keys = self._now(sight)
        if reading.view is None and self._stages[-1][0].kind == "inputs" and not keys:
            raise NoPlan
        self._add(Save(reading, keys, called, False, line))
        if assigned is not None:
            self._names[assigned] = sight

    def _change(self, line: int, sign: str, place: Form, value: Form) -> None:
        target = self._value(place, line)
        reading, keys = self._now(target)
        operand = self._value(value, line)
        assigned = place[0] == "attribute"
        if (not keys and not assigned) or self._is_followed(reading):
            raise NoPlan
        self._add(Change(reading, keys, "" if sign == "=" else sign, self._operand(operand), assigned, line))  # type: ignore[arg-type]
        self._age += 1
        self._renew(target)

    def _is_followed(self, reading: Read) -> bool:
        """Whether a change of a reading may show in what was saved of it before: in lists and dicts it does."""
        event, deeds = self._stages[-1]
        saves = [deed for deed in deeds if isinstance(deed, Save) and deed.reading == reading]
        return any(save.appends or event.kind == "inputs" for save in saves)

    def _renew(self, changed: Sight) -> None:
        """The reading that was changed has the change in it; others have not."""
        for name, value in self._names.items():
            if isinstance(value, Sight) and value.reading == changed.reading and value.age == self._age - 1:
                self._names[name] = value._replace(age=self._age)

    def _each(self, line: int, names: tuple[str, ...], each: Form, body: Sequence[Form]) -> None:
        if len(names) == 2 and "enumerate" in self._names:
            raise NoPlan
        found = self._value(each)
        if type(found) not in (Envoy, list, tuple, range):
            raise NoPlan
        for number, item in enumerate(found):
            self._count()
            self._names.update(zip(names, (item,) if len(names) == 1 else (number, item), strict=True))
            self._run(body)

    def _take(self, name: str) -> None:
        """A name is saved once in a step, and a list is the only one of its name, which may be appended to later."""
        if name in self._saved or name in self._followed:
            raise NoPlan
        self._saved.add(name)

    def _count(self) -> None:
        self._deeds += 1
        if self._deeds > MOST:
            raise NoPlan

    def _add(self, deed: Deed) -> None:
        self._count()
        self._stages[-1][1].append(deed)

    def _now(self, value: Any) -> tuple[Read, tuple[Any, ...]]:
        """A reading that shows what there is now, where the model is now."""
        here = isinstance(value, Sight) and self._stages and value.reading in self._stages[-1][1]
        if not here or value.epoch != self._epoch or value.age != self._age:
            raise NoPlan
        return value.reading, value.keys

    def _operand(self, value: Any) -> Number | int:
        if type(value) in (int, float):
            return Number(repr(value), value)
        self._operands.append(self._tensor(value))
        return len(self._operands) - 1

    def _read(self, location: Location, view: View | None, asked: object, line: int) -> Sight:
        interleaver = self._interleaver
        event = interleaver.event(location)
        interleaver.check(event)
        if not self._stages or self._stages[-1][0] != event:
            passed = interleaver.order.only(event)
            if passed is None or passed <= self._clock:
                raise NoPlan
            self._clock, self._age = passed, 0
            self._stages.append((event, []))
        reading = Read(self._readings, view, asked, line)
        self._readings += 1
        self._add(reading)
        return Sight(reading, (), self._epoch, self._age)


def _beginning(program: Any, model: Any, tracer: Tracer) -> tuple[str, str, dict[str, Any]]:
    """The file and the function of a block, and what names mean where it begins."""
    if isinstance(program, FunctionType):
        code = program.__code__
        return code.co_filename, code.co_name, _values(program, model, tracer)
    return *program.place, program.names(model, tracer)


def _values(program: FunctionType, model: Any, tracer: Tracer) -> dict[str, Any]:
    """What names mean in a function."""
    code = program.__code__
    parameters = code.co_varnames[: code.co_argcount]
    if code.co_kwonlyargcount or len(parameters) < 2:
        raise NoPlan
    values: dict[str, Any] = {name: program.__globals__[name] for name in code.co_names if name in program.__globals__}
    cells: Mapping[str, Any] = dict(zip(code.co_freevars, program.__closure__ or (), strict=True))
    local = {*code.co_varnames, *code.co_cellvars}
    values = {name: value for name, value in values.items() if name not in local and name not in cells}
    values.update((name, cell.cell_contents) for name, cell in cells.items())
    defaults = program.__defaults__ or ()
    if len(defaults) < len(parameters) - 2:
        raise NoPlan
    values.update(zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True))
    values.update(zip(parameters[:2], (model, tracer), strict=True))
    return values
