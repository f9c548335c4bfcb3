"""What a block does to an object from outside stays in its copy, which is warned of where it is seen to matter."""

from __future__ import annotations

import functools
import linecache
import textwrap
import warnings
from typing import Any

import pytest

from nnsight_async.capture.function import from_function

OUTSIDE = """
from types import SimpleNamespace
from nnsight_async.interleave.context import save
from nnsight_async.interleave import context as package

def values():
    return [], {}, set(), 0, SimpleNamespace(all=[], n=0), [[]], 3
"""

LOST = {
    "append": ("acc.append(x)", "acc", "`acc.save()`"),
    "extend": ("acc.extend([x, x])", "acc", "`acc.save()`"),
    "insert": ("acc.insert(0, x)", "acc", "`acc.save()`"),
    "+= of a list": ("acc += [x]", "acc", "`acc.save()`"),
    "an item": ("d['k'] = x", "d", "`d.save()`"),
    "update": ("d.update(k=x)", "d", "`d.save()`"),
    "setdefault": ("d.setdefault('k', x)", "d", "`d.save()`"),
    "add": ("names.add(x)", "names", "`value = ....save()`"),
    "+= of a number": ("total += x", "total", "`total.save()`"),
    "in a loop": ("for i in [1, 2]:\n    if i:\n        acc.append(i)", "acc", "`acc.save()`"),
    "and read there": ("acc.append(x)\nprint(acc)", "acc", "`acc.save()`"),
    "an attribute": ("box.n = x", "box.n", "`value = ....save()`"),
    "an attribute that grows": ("box.n += x", "box.n", "`value = ....save()`"),
    "a list in an object": ("box.all.append(x)", "box.all", "`value = ....save()`"),
    "a list in a list": ("many[0].append(x)", "many[0]", "`value = ....save()`"),
    "beside another save": ("y = save(x)\nacc.append(x)", "acc", "`acc.save()`"),
}

NOT_READ = ("append", "an item", "add", "+= of a number", "an attribute", "a list in an object", "in a loop")

FINE = {
    "saved": "acc.append(x)\nacc.save()",
    "saved by the function": "acc.append(x)\nsave(acc)",
    "saved first": "acc.save()\nacc.append(x)",
    "saved under another name": "acc.append(x)\nother = save(acc)",
    "saved under a name": "acc.append(x)\nsave(acc, 'all')",
    "saved under a keyword": "acc.append(x)\nacc.save(name='all')",
    "saved in part": "acc.append(x)\nlast = acc[-1].save()",
    "saved by the package": "acc.append(x)\npackage.save(acc)",
    "its own": "acc = []\nacc.append(x)\nacc.save()",
    "saved from the start": "acc = save([])\nacc.append(x)",
    "own number": "total = 0\ntotal += x\ntotal.save()",
    "read alone": "y = save(len(acc))",
    "of the model": "model.place = x",
    "of a module": "layer.place = x\nlayer.places[0] = x",
    "a function of the block": "def f(acc):\n    acc.append(x)\nf([])",
}


def program(body: str, after: str) -> str:
    return (
        f"{OUTSIDE}\ndef run():\n    acc, d, names, total, box, many, x = values()\n    with trace():\n"
        f"{textwrap.indent(body, ' ' * 8)}\n    {after}\n"
    )


@pytest.mark.parametrize(("body", "place", "advice"), LOST.values(), ids=LOST)
def test_is_warned_of(body: str, place: str, advice: str, cell: Any, trace: Any) -> None:
    run = cell(program(body, f"return {place}"), trace=trace)["run"]

    with pytest.warns(UserWarning, match="where it is a copy") as caught:
        found = run()
    (warning,) = caught
    text = str(warning.message)
    assert repr(place) in text
    assert advice in text
    assert found in ([], {}, set(), 0)
    assert "with trace" in linecache.getline(warning.filename, warning.lineno)
    changing, using = (int(part.split()[0]) for part in text.split("line ")[1:])
    name = place.partition(".")[0].partition("[")[0]
    assert name in linecache.getline(warning.filename, changing)
    assert linecache.getline(warning.filename, using).strip() == f"return {place}"


@pytest.mark.parametrize("body", [LOST[name][0] for name in NOT_READ], ids=NOT_READ)
def test_is_warned_of_where_the_block_does_not_read_it_either(body: str, cell: Any, trace: Any) -> None:
    """Another cell may read it, or who called the function; from the block nothing comes there."""
    with pytest.warns(UserWarning, match="where it is a copy"):
        cell(program(body, "return 1"), trace=trace)["run"]()


def test_what_the_block_alone_uses_is_fine(cell: Any, trace: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cell(program("acc.append(x)\nprint(len(acc))\ntotal += x\nprint(total)", "return 1"), trace=trace)["run"]()


@pytest.mark.parametrize("body", FINE.values(), ids=FINE)
def test_is_fine(body: str, cell: Any, trace: Any, model: Any) -> None:
    class Module:
        """Stands for a module of the model."""

        places = (0, 1)
        __block_reference__ = model.__block_reference__

    model.here = type("Here", (), {"places": {}})()
    text = program(body, "return acc, total, d, box.n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cell(text, trace=trace, model=model, layer=Module())["run"]()


def test_at_the_top_of_a_cell(cell: Any, trace: Any) -> None:
    text = "with trace():\n    acc.append(1)\n"

    with pytest.warns(UserWarning, match=r"line 2 changes 'acc' .* does not come home\. Write `acc\.save\(\)`"):
        cell(text, trace=trace, acc=[])
    found = cell("with trace():\n    acc.append(1)\n    acc.save()\n", trace=trace, acc=[0])
    assert found["acc"] == [0, 1]


def test_what_a_function_reads_that_the_block_calls_is_fine(cell: Any, trace: Any) -> None:
    text = "def read():\n    return acc[0]\nwith trace():\n    acc.append(1)\n    read()\n"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cell(text, trace=trace, acc=[])


def test_a_probe() -> None:
    acc: list[int] = []
    total: dict[str, int] = {}

    def fills(model: Any, tracer: Any) -> None:
        for step in tracer:
            print(step)
            acc.append(step)

    def fills_items(model: Any, tracer: Any) -> None:
        total.update(a=1)
        model.save()

    for probe, name in ((fills, "acc"), (fills_items, "total"), (functools.partial(fills), "acc")):
        with pytest.warns(UserWarning, match=rf"changes '{name}' .* Write `{name}\.save\(\)`") as caught:
            from_function(probe)
        assert f"{name}." in linecache.getline(caught[0].filename, caught[0].lineno)


def test_a_probe_that_uses_what_it_fills() -> None:
    acc: list[int] = []

    def reads(model: Any, tracer: Any) -> None:
        acc.append(1)
        model.here = len(acc)

    def saves(model: Any, tracer: Any) -> None:
        acc.append(1)
        acc.save()  # type: ignore[attr-defined]

    def own(model: Any, tracer: Any) -> None:
        mine = []
        mine.append(1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for probe in (reads, saves, own):
            from_function(probe)
