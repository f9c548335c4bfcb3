"""What a block of few forms does on a model: the plan that takes its place, where there is one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import greenlet
import torch

from nnsight_async.interleave.context import BlockGreenlet
from nnsight_async.interleave.context import save as save_function
from nnsight_async.interleave.lent import Lent
from nnsight_async.interleave.locations import LOGITS, SAMPLES, Location
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
    Slice,
    Stage,
    as_key,
    one_of,
)
from nnsight_async.interleave.tracer import Tracer
from nnsight_async.interleave.views import FirstArgument
from nnsight_async.tree import residual
from nnsight_async.tree.envoy import SETTABLE, Envoy
from nnsight_async.tree.model import ModelView
from nnsight_async.tree.references import envoy_at

if TYPE_CHECKING:
    from nnsight_async.capture.plain import Form
    from nnsight_async.interleave.block import BlockRun
    from nnsight_async.interleave.interleaver import Interleaver
    from nnsight_async.interleave.views import View

LARGEST = 1 << 63

MOST = 500
"""Deeds that a plan may have."""

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv,
}  # fmt: skip
STREAMS = {"resid_pre": residual.before, "resid_mid": residual.middle, "resid_post": residual.after}


class _NoPlan(Exception):  # noqa: N818 -- not raised to anybody
    """The block is to run as it stands."""


def plan_of(run: BlockRun, interleaver: Interleaver, plain: str) -> Planned | None:
    """What takes the place of the block of `run`; None where that has to run, because of what it does or names.

    `plain` is the attribute of its function that has its text as data.
    """
    forms = getattr(run.program, plain, None)
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


class _Sight(NamedTuple):
    """A reading, or a part of it, as it was in its step."""

    reading: Read
    keys: tuple[Any, ...]
    epoch: int
    """Which phase it was read in."""
    age: int
    """How many changes were made there before."""


class _List:
    """A list that has been saved, under this name."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Forbidden:
    """What a name stands for that may not be used: the number of the step."""


class _Maker:
    """Goes through a block once for each of its phases."""

    def __init__(self, run: BlockRun, interleaver: Interleaver) -> None:
        self._interleaver = interleaver
        self._tracer = run.tracer
        self._operands: list[torch.Tensor] = []
        self._filename, self._function, self._names = _beginning(run.program, interleaver.model, run.tracer)
        self._epoch = 0
        self._readings = 0
        self._deeds = 0
        self._begin()

    def make(self, forms: Sequence[Form]) -> Planned:
        loop = forms[-1] if forms and forms[-1][0] == "steps" else None
        self._run(forms if loop is None else forms[:-1])
        if loop is None:
            plan = Plan(self._phase(), Phase(), ONCE, self._filename, self._function)
            return Planned(one_of(plan), tuple(self._operands), plan.last())
        _, _, name, tracer, steps, body = loop
        if self._value(tracer) is not self._tracer:
            raise _NoPlan
        start, stop, stride = self._steps(steps)
        alone = self._phase()
        assigned = {each[2] for each in body if each[0] in ("let", "list")} | {name}
        kept = {known: value for known, value in self._names.items() if known not in assigned}
        self._names = {**kept, name: _Forbidden()}
        if start == 0:  # in the same step as what stands before the loop
            self._run(body)
            first = self._phase()
        else:
            first = alone
        self._begin()
        self._names = {**kept, name: _Forbidden()}
        self._run(body)
        later = self._phase()
        plan = Plan(first, later, (start, stop, stride), self._filename, self._function)
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
            return number, number + 1, 1
        start, stop, stride = (None if part is None else self._integer(self._value(part)) for part in key[1:])
        if (start or 0) < 0 or (stop or 0) < 0 or (stride is not None and stride < 1):
            raise _NoPlan
        return start or 0, stop, stride or 1

    # -- statements ------------------------------------------------------------------------------------------------

    def _run(self, forms: Sequence[Form]) -> None:
        for form in forms:
            getattr(self, f"_{form[0]}")(*form[1:])

    def _let(self, line: int, name: str, value: Form) -> None:
        self._names[name] = self._value(value, line)

    def _list(self, line: int, name: str, called: str | None) -> None:
        if called is not None and called in self._names:
            raise _NoPlan
        self._take(name)
        self._lists.append(name)
        self._names[name] = _List(name)

    def _append(self, line: int, name: str, value: Form) -> None:
        into = self._names[name]
        if not isinstance(into, _List):
            raise _NoPlan
        self._add(Save(*self._now(self._value(value, line)), into.name, True, line))

    def _save(self, line: int, saver: Form | None, name: Form, value: Form, assigned: str | None) -> None:
        if saver is not None:
            kind, function = saver
            found = self._value(function)
            if found is not (self._tracer if kind == "method" else save_function):
                raise _NoPlan
        sight, called = self._value(value, line), self._value(name)
        if type(called) is not str or not called.isprintable():
            raise _NoPlan
        self._take(called)
        self._add(Save(*self._now(sight), called, False, line))
        if assigned is not None:
            self._names[assigned] = sight

    def _change(self, line: int, sign: str, place: Form, value: Form) -> None:
        target = self._value(place, line)
        reading, keys = self._now(target)
        operand = self._value(value, line)
        assigned = place[0] == "attribute"
        if not keys and not assigned:
            raise _NoPlan
        self._add(Change(reading, keys, "" if sign == "=" else sign, self._operand(operand), assigned, line))  # type: ignore[arg-type]
        self._age += 1
        self._renew(target)

    def _renew(self, changed: _Sight) -> None:
        """The reading that was changed has the change in it; others have not."""
        for name, value in self._names.items():
            if isinstance(value, _Sight) and value.reading == changed.reading and value.age == self._age - 1:
                self._names[name] = value._replace(age=self._age)

    def _each(self, line: int, names: tuple[str, ...], each: Form, body: Sequence[Form]) -> None:
        if len(names) == 2 and "enumerate" in self._names:
            raise _NoPlan
        found = self._value(each)
        if not isinstance(found, (Envoy, list, tuple, range)) or type(found) not in (list, tuple, range, type(found)):
            raise _NoPlan
        for number, item in enumerate(found):
            self._names.update(zip(names, (item,) if len(names) == 1 else (number, item), strict=True))
            self._run(body)

    def _take(self, name: str) -> None:
        """A name is saved once in a step."""
        if name in self._saved:
            raise _NoPlan
        self._saved.add(name)

    def _add(self, deed: Deed) -> None:
        self._deeds += 1
        if self._deeds > MOST:
            raise _NoPlan
        self._stages[-1][1].append(deed)

    def _now(self, value: Any) -> tuple[Read, tuple[Any, ...]]:
        """A reading that shows what there is now, where the model is now."""
        here = isinstance(value, _Sight) and self._stages and value.reading in self._stages[-1][1]
        if not here or value.epoch != self._epoch or value.age != self._age:
            raise _NoPlan
        return value.reading, value.keys

    def _operand(self, value: Any) -> Number | int:
        if type(value) in (int, float):
            return Number(repr(value), value)
        self._operands.append(self._tensor(value))
        return len(self._operands) - 1

    @staticmethod
    def _tensor(value: Any) -> torch.Tensor:
        """A tensor that the block has brought along."""
        known = type(value) in (torch.Tensor, torch.nn.Parameter, Lent)
        if not known or value.requires_grad or value.layout is not torch.strided:
            raise _NoPlan
        return value.plain() if isinstance(value, Lent) else value

    # -- expressions -----------------------------------------------------------------------------------------------

    def _value(self, form: Form, line: int = 0) -> Any:
        match form:
            case ("name", name):
                value = self._names[name]
                if isinstance(value, _Forbidden):
                    raise _NoPlan
                return value
            case ("constant", value):
                return value
            case ("negative", of):
                return -self._concrete(self._value(of, line))
            case ("attribute", of, name):
                return self._attribute(self._value(of, line), name, line)
            case ("item", of, key):
                return self._item(self._value(of, line), self._key(key))
            case ("binary", sign, left, right):
                operands = [self._concrete(self._value(each, line)) for each in (left, right)]
                return self._computed(sign, *operands)
            case ("module", path):
                return envoy_at(self._interleaver.model.tree, path)
            case ("text", parts):
                return "".join(_text(self._value(part, line)) for part in parts)
            case _:
                raise _NoPlan

    def _attribute(self, of: Any, name: str, line: int) -> Any:
        if isinstance(of, ModelView):
            if name in ("logits", "samples"):
                return self._read(LOGITS if name == "logits" else SAMPLES, None, f"model.{name}", line)
            found = getattr(of, name)
            if type(found) is not Envoy or name in SETTABLE:
                raise _NoPlan
            return found
        if type(of) is not Envoy:
            raise _NoPlan
        if name not in SETTABLE:
            found = getattr(of, name)
            if type(found) is not Envoy:
                raise _NoPlan
            return found
        path = of.__block_reference__()[1]
        if of.__block_owner__.modules[path].reason is not None:
            raise _NoPlan
        if name in STREAMS:
            location, view, asked = STREAMS[name](of.__block_owner__, path)
            return self._read(location, view, asked, line)
        location = Location(path, name)  # type: ignore[arg-type]
        return self._read(location, FirstArgument() if name == "input" else None, str(location), line)

    def _read(self, location: Location, view: View | None, asked: str, line: int) -> _Sight:
        interleaver = self._interleaver
        event = interleaver.event(location)
        interleaver.check(event)
        if not self._stages or self._stages[-1][0] != event:
            passed = interleaver.order.after(event, self._clock)
            if passed is None or passed < 0 or interleaver.order.after(event, passed) is not None:
                raise _NoPlan
            if interleaver.order.after(event, -1) != passed:  # it has been passed once before
                raise _NoPlan
            self._clock, self._age = passed, 0
            self._stages.append((event, []))
        reading = Read(self._readings, view, asked, line)
        self._readings += 1
        self._add(reading)
        return _Sight(reading, (), self._epoch, self._age)

    def _item(self, of: Any, key: Any) -> Any:
        if isinstance(of, _Sight):
            return of._replace(keys=(*of.keys, key))
        if type(of) is Envoy and type(key) in (int, str):
            return of[key]
        if isinstance(key, (tuple, Slice)) or key is None or key is Ellipsis:
            return self._tensor(of)[as_key(key)]
        if isinstance(of, torch.Tensor):
            return self._tensor(of)[key]
        if type(of) in (list, tuple, dict):
            return of[key]
        raise _NoPlan

    def _key(self, form: Form) -> Any:
        match form:
            case ("slice", *parts):
                return Slice(*(None if part is None else self._integer(self._value(part)) for part in parts))
            case ("keys", parts):
                return tuple(map(self._key, parts))
            case ("rest",):
                return Ellipsis
            case _:
                key = self._value(form)
                if key is not None and type(key) not in (int, str):
                    raise _NoPlan
                return key

    def _computed(self, sign: str, left: Any, right: Any) -> Any:
        """What is of the size of an operand at most; anything else the block may compute itself."""
        if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
            shape = torch.broadcast_shapes(left.shape, right.shape)
            if shape not in (left.shape, right.shape):
                raise _NoPlan
        with torch.no_grad():
            return self._concrete(OPERATORS[sign](left, right))

    @staticmethod
    def _integer(value: Any) -> int:
        if type(value) is not int:
            raise _NoPlan
        return value

    @staticmethod
    def _concrete(value: Any) -> Any:
        """A number or a tensor of the block's own."""
        if type(value) is int and abs(value) > LARGEST:
            raise _NoPlan
        return value if type(value) in (int, float) else _Maker._tensor(value)


def _text(value: Any) -> str:
    if type(value) not in (int, str):
        raise _NoPlan
    return str(value)


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
        raise _NoPlan
    values: dict[str, Any] = {name: program.__globals__[name] for name in code.co_names if name in program.__globals__}
    cells: Mapping[str, Any] = dict(zip(code.co_freevars, program.__closure__ or (), strict=True))
    local = {*code.co_varnames, *code.co_cellvars}
    values = {name: value for name, value in values.items() if name not in local and name not in cells}
    values.update((name, cell.cell_contents) for name, cell in cells.items())
    defaults = program.__defaults__ or ()
    if len(defaults) < len(parameters) - 2:
        raise _NoPlan
    values.update(zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True))
    values.update(zip(parameters[:2], (model, tracer), strict=True))
    return values
