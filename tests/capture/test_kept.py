"""What is saved into an object from outside the block would be lost, so it is refused before anything runs."""

from __future__ import annotations

import functools
import textwrap
from typing import Any

import pytest

from nnsight_async.capture.function import from_function
from nnsight_async.errors import CaptureError
from nnsight_async.interleave.context import save

OUTSIDE = """
import collections
from contextlib import nullcontext
from types import SimpleNamespace
from nnsight_async.interleave.context import save
from nnsight_async.interleave import context as package

class Plain: pass
class Slotted:
    __slots__ = ("x",)
class Store:
    def add(self, value): pass
    @property
    def x(self): return 0
    @x.setter
    def x(self, value): pass
class Free:
    def __setattr__(self, name, value): pass
    def __setitem__(self, key, value): pass

x, y, i, hs, d, total, pair = 3, 4, 0, [], {}, 0, (3, 4)
deep = Plain()
deep.results = {"all": [0]}
r, s, store, free, many = Plain(), Slotted(), Store(), Free(), [hs]
queue, names, space = collections.deque(), set(), SimpleNamespace()
"""

LOST = {
    "hs.append(x.save())": "`hs = save([])` in the block",
    "hs.append(save(x))": "`hs = save([])` in the block",
    "hs.append(package.save(x + 1))": "`hs = save([])` in the block",
    "hs.append((i, x.save()))": "`hs = save([])` in the block",
    "hs.append(str(x.save()))": "`hs = save([])` in the block",
    "hs.insert(0, x.save())": "`hs = save([])` in the block",
    "hs.extend([x.save(), y.save()])": "`hs = save([])` in the block",
    "hs.extend(v.save() for v in pair)": "`hs = save([])` in the block",
    "for v in pair:\n    if v:\n        hs.append(v.save())": "`hs = save([])` in the block",
    "try:\n    z = x\nfinally:\n    hs.append(z.save())": "`hs = save([])` in the block",
    "with nullcontext():\n    hs.append(x.save())": "`hs = save([])` in the block",
    "match x:\n    case 3:\n        hs.append(x.save())": "`hs = save([])` in the block",
    "hs[0] = x.save()": "`hs = save([])` in the block",
    "hs[i]: int = x.save()": "`hs = save([])` in the block",
    "d['k'] = x.save()": "`d = save({})` in the block",
    "d['k'] = [v.save() for v in pair]": "`d = save({})` in the block",
    "d['k'] += x.save()": "`d = save({})` in the block",
    "d['k'] = d['l'] = x.save()": "`d = save({})` in the block",
    "d.update(k=x.save())": "`d = save({})` in the block",
    "d.setdefault('k', x.save())": "`d = save({})` in the block",
    "total += x.save()": "`value = ....save()`",
    "hs += [x.save()]": "`hs = save([])` in the block",
    "queue.append(x.save())": "`value = ....save()`",
    "names.add(x.save())": "`value = ....save()`",
    "r.x = x.save()": "`value = ....save()`",
    "r.x: int = x.save()": "`value = ....save()`",
    "space.x = x.save()": "`value = ....save()`",
    "s.x = x.save()": "`value = ....save()`",
    "deep.results['k'] = x.save()": "`value = ....save()`",
    "deep.results['all'].append(x.save())": "`value = ....save()`",
    "many[0].append(x.save())": "`value = ....save()`",
}

FINE = [
    "hs = save([])\nhs.append(x)",
    "hs = save([])\nhs.append(x.save())",
    "hs = [].save()\nfor v in pair:\n    hs.append(v)",
    "hs = []\nhs.append(x.save())\nhs.save()",
    "hs.append(x.save())\nhs.save()",
    "hs.append(x)\nx.save()",
    "hs.append(z := x.save())",
    "hs = d['k'] = x.save()",
    "print(x.save(), end='')",
    "len([x.save()])",
    "d.get(x.save())",
    "store.add(x.save())",
    "store.x = x.save()",
    "free.x = x.save()",
    "free[0] = x.save()",
    "hs = [x.save()]",
    "for hs in many:\n    hs.append(x.save())",
    "local = {}\nlocal['k'] = x.save()",
    "def f(hs):\n    hs.append(x.save())\nf([])",
    "many[i].append(x.save())",
    "model.place = x.save()",
    "module.layer.output = x.save()",
    "hs.append(x.save('mine'))",
    "hs.append(x.save(name=i))",
]


def program(body: str, outside: str = OUTSIDE) -> str:
    return f"{outside}\ndef run():\n    with trace() as run:\n{textwrap.indent(body, '        ')}\n"


@pytest.mark.parametrize(("body", "advice"), LOST.items(), ids=LOST)
def test_is_refused(body: str, advice: str, cell: Any, trace: Any, saves: Any) -> None:
    local = "x, y, i, hs, d, total, pair = 3, 4, 0, [], {}, 0, (3, 4)\n"
    for text in (program(body), OUTSIDE + "with trace():\n" + textwrap.indent(body, "    ") + "\nrun = lambda: 0\n"):
        text = text.replace("def run():\n", "def run():\n    " + local)
        with pytest.raises(CaptureError) as refused:
            cell(text, trace=trace)["run"]()

        line = next(line.strip() for line in body.splitlines() if "save(" in line)
        assert advice in str(refused.value)
        assert str(refused.value).endswith(f"\n    {line}")
        assert saves == {}


@pytest.mark.filterwarnings("ignore:.*where it is a copy:UserWarning")
@pytest.mark.parametrize("body", FINE)
def test_is_accepted(body: str, cell: Any, trace: Any, saves: Any, model: Any) -> None:
    class Module:
        layer = model

    model.here = type("Here", (), {})()
    cell(program(body).replace("run():", "run(hs=hs, d=d):", 1), trace=trace, model=model, module=Module)["run"]()

    assert saves


def test_a_method_of_the_users_own_class(trace: Any) -> None:
    class Experiment:
        def __init__(self) -> None:
            self.hidden = None
            self.all: list[int] = []

        def attribute(self) -> None:
            with trace():
                self.hidden = (1).save()

        def item(self) -> None:
            with trace():
                self.all.append((1).save())

    with pytest.raises(CaptureError, match=r"'self' is bound outside(.|\n)*self\.hidden = \(1\)\.save\(\)"):
        Experiment().attribute()
    with pytest.raises(CaptureError, match=r"'self' is bound outside(.|\n)*self\.all\.append"):
        Experiment().item()


def test_before_the_body_is_left_nothing_is_traced(trace: Any) -> None:
    hs: list[int] = []
    run = trace()
    with pytest.raises(CaptureError), run:
        hs.append((1).save())

    assert not run.captured
    assert hs == []


OUTER: list[int] = []


def test_a_probe() -> None:
    hs: list[int] = []

    def closure(model: Any, tracer: Any) -> None:
        hs.append(model.save())

    def of_the_module(model: Any, tracer: Any) -> None:
        OUTER.append(model.save())

    for probe, name in ((closure, "hs"), (of_the_module, "OUTER"), (functools.partial(closure), "hs")):
        with pytest.raises(CaptureError, match=rf"test_kept\.py, line \d+: (.|\n)*`{name} = save\(\[\]\)`"):
            from_function(probe)


def test_a_probe_that_keeps_in_its_own() -> None:
    def probe(model: Any, tracer: Any) -> None:
        hs = []
        hs.append(model.save())
        tracer.x = model.save()

    assert from_function(probe).names == ()


def helper(x: Any) -> None:
    OUTER.append(x.save())


def test_a_helper(trace: Any) -> None:
    with pytest.raises(CaptureError, match=r"'OUTER' is bound outside(.|\n)*OUTER\.append\(x\.save\(\)\)"), trace():
        helper(1)


def test_private_names(trace: Any, saves: Any) -> None:
    class Experiment:
        def __init__(self) -> None:
            self.__all: list[int] = []

        def kept(self) -> None:
            with trace():
                self.__all.append((1).save())

        def kept_in_a_variable(self) -> None:
            __found: list[int] = []
            with trace():
                __found.append((1).save())

        def filled(self) -> list[int]:
            with trace():
                self.__all.append(1)
            return self.__all

        def bound(self) -> tuple[int, int]:
            with trace():
                __x = (4).save()
                __y = save(__x + 1)
            return __x, __y

        def saved(self) -> list[int]:
            __found = [0]
            with trace():
                __found.append(2)
                __found.save()  # type: ignore[attr-defined]
            return __found

    experiment = Experiment()
    with pytest.raises(CaptureError, match=r"self\.__all\.append"):
        experiment.kept()
    with pytest.raises(CaptureError, match=r"`__found = save\(\[\]\)`"):
        experiment.kept_in_a_variable()
    with pytest.warns(UserWarning, match=r"changes 'self\.__all'"):
        assert experiment.filled() == []
    assert experiment.bound() == (4, 5)
    assert saves == {"__x": 4, "__y": 5}
    assert experiment.saved() == [0, 2]
