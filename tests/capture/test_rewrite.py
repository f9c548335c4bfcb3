# ruff: noqa: PT012 -- a block is what is assigned in it, and may well be several statements
"""Saves in the text of a block know the name they are assigned to."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from nnsight_async.interleave import context

# text: (what is saved, the block's names)
SAVES: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "h = x.save()": ({"h": 3}, ("h",)),
    "h: int = x.save()": ({"h": 3}, ("h",)),
    "print(h := x.save(), file=sink)": ({"h": 3}, ("h",)),
    "a = b = x.save()": ({"a": 3, "b": 3}, ("a", "b")),
    "a, b = x.save(), y.save()": ({"a": 3, "b": 4}, ("a", "b")),
    "[a, (b, c)] = x.save(), (y.save(), 5)": ({"a": 3, "b": 4}, ("a", "b")),
    "a, b = pair.save()": ({"a": 3, "b": 4}, ("a", "b")),
    "a, *b = pair.save()": ({"a": 3, "b": [4]}, ("a", "b")),
    "x.save()": ({"x": 3}, ("x",)),
    "(x + 1).save()": ({"x + 1": 4}, ()),
    "pair[0].save()": ({"pair[0]": 3}, ()),
    "box = {}; box['k'] = x.save()": ({"x": 3}, ()),
    "h = x.save() if y else None": ({"h": 3}, ("h",)),
    "h = x.save() + 1": ({"x": 3}, ()),
    "h = (a := x.save())": ({"h": 3, "a": 3}, ("h", "a")),
    "h = [v.save() for v in pair]": ({"h": [3, 4]}, ("h",)),
    "h = (x.save(), y.save())": ({"h": (3, 4)}, ("h",)),
    "h = {'x': x.save(), 'more': [y.save()]}": ({"h": {"x": 3, "more": [4]}}, ("h",)),
    "h = {v: v.save() for v in pair}": ({"h": {3: 3, 4: 4}}, ("h",)),
    "h = {x.save(), y.save()}": ({"h": {3, 4}}, ("h",)),
    "h = [str(v.save()) for v in pair]": ({"v": 4}, ()),
    "h = list().save()\nfor v in pair: h.append(v)": ({"h": [3, 4]}, ("h",)),
    "h = save(x)": ({"h": 3}, ("h",)),
    "h: int = save(x)": ({"h": 3}, ("h",)),
    "a = b = save(x)": ({"a": 3, "b": 3}, ("a", "b")),
    "a, b = save(x), save(y)": ({"a": 3, "b": 4}, ("a", "b")),
    "h = package.save(x)": ({"h": 3}, ("h",)),
    "save(x)": ({"x": 3}, ("x",)),
    "save(x, 'mine')": ({"mine": 3}, ()),
    "h = save(x, 'mine')": ({"mine": 3}, ()),
    "x.save('mine')": ({"mine": 3}, ()),
    "x.save(name='mine')": ({"mine": 3}, ()),
    "h = x.save(name='mine')": ({"mine": 3}, ()),
    "h = pair[0].save('mine')": ({"mine": 3}, ()),
    "h = (x + y).save(f'm{x}')": ({"m3": 7}, ()),
    "h = x + y\nk = h.save('mine')": ({"mine": 7}, ()),
    "h, n = x + y, 'mine'\nh.save(n)": ({"mine": 7}, ()),
    "a, b = pair.save('mine')": ({"mine": (3, 4)}, ()),
    "seen = [v.save(f'v{v}') for v in pair]": ({"v3": 3, "v4": 4}, ()),
    "def f(v):\n    return v.save('mine')\nk = f(x)": ({"mine": 3}, ()),
    "h = run.save(x)": ({"h": 3}, ("h",)),
    "run.save(x)": ({"x": 3}, ("x",)),
    "a = b = run.save(x)": ({"a": 3, "b": 3}, ("a", "b")),
    "h = run.save('text')": ({"h": "text"}, ("h",)),
    "h = run.save(x, 'mine')": ({"mine": 3}, ()),
    "box = [run.save(x)]": ({"x": 3}, ()),
    "run.save(x + 1)": ({"x + 1": 4}, ()),
    "save(x + 1)": ({"x + 1": 4}, ()),
    "package.save(pair[0])": ({"pair[0]": 3}, ()),
    "print(save(x * 2), save(y), file=sink)": ({"x * 2": 6, "y": 4}, ()),
    "def f(v):\n    save(v)\n    run.save(-v)\nf(x)": ({"v": 3, "-v": -3}, ()),
    "len([save(v) for v in pair])": ({"v": 4}, ()),
    "save(save(x) + 1)": ({"x": 3, "save(x) + 1": 4}, ()),
    "a = b = package.save(x)": ({"a": 3, "b": 3}, ("a", "b")),
    "def f(v):\n    h = v.save()\n    return h\nk = f(x)": ({"v": 3}, ()),
    "f = lambda v: v.save()\nf(x)": ({"v": 3}, ()),
    "x = x.save()": ({"x": 3}, ("x",)),
    "for v in pair: last = v.save()": ({"last": 4}, ("last",)),
}


@pytest.mark.parametrize(("text", "expected"), SAVES.items(), ids=SAVES.keys())
def test_what_is_saved(text: str, expected: Any, cell: Any, trace: Any, saves: Any) -> None:
    program = textwrap.dedent("""
    import io
    from nnsight_async.interleave.context import save
    from nnsight_async.interleave import context as package
    x, y, pair, sink = 3, 4, (3, 4), io.StringIO()
    with trace() as run:
    """) + textwrap.indent(text, "    ")

    names = cell(program, trace=trace)["run"].block.names

    assert (saves, names) == expected


def test_saved_values_are_bound_in_the_caller(trace: Any) -> None:
    hidden = logits = None
    with trace():
        hidden = [1, 2].save()
        logits = sum(hidden).save()

    assert (hidden, logits) == ([1, 2], 3)


def test_a_call_named_save_that_is_not_ours_gets_no_name(trace: Any, saves: Any) -> None:
    class Store:
        def save(self, value: int) -> int:
            return value + 100

    store = Store()
    with trace() as run:
        key = store.save(1)
        key.save()
        store.save(2)

    assert (key, saves, run.block.names) == (101, {"key": 101}, ("key",))


def test_arguments_of_a_save_are_left_alone(cell: Any, trace: Any, saves: Any) -> None:
    class Figure:
        def save(self, path: str, dpi: int) -> str:
            return f"{path}:{dpi}"

    with trace():
        done = Figure().save("a.png", dpi=3)
        result = done.save()

    assert (result, saves) == ("a.png:3", {"result": "a.png:3"})


def test_a_name_given_to_a_save_of_another_kind_is_an_argument(trace: Any, saves: Any) -> None:
    class Figure:
        def save(self, name: str) -> str:
            return f"written to {name}"

    with trace():
        first = Figure().save("a.png").save()
        second = Figure().save(name="b.png").save()

    assert (first, second) == ("written to a.png", "written to b.png")
    assert saves == {"first": first, "second": second}


def test_attributes_that_gradients_have_too_are_left_alone(trace: Any) -> None:
    class Slope:
        grad, backward = 3, staticmethod(lambda steps: -steps)

    with trace():
        Slope.grad = 5
        match 5:
            case Slope.grad:
                found = (Slope.grad, Slope.backward(2), Slope().grad).save()

    assert found == (5, -2, 5)


def test_a_traceback_points_at_the_save(trace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import traceback

    def refuse(value: object, name: str, label: str) -> None:
        raise TypeError(name)

    monkeypatch.setattr(context, "save_expression", refuse)
    with pytest.raises(TypeError, match="later") as caught, trace():
        first = 1
        later = (first
                 + 1).save()  # fmt: skip

    frame = traceback.extract_tb(caught.value.__traceback__)[-2]
    assert (frame.filename, frame.lineno) == (
        __file__,
        test_a_traceback_points_at_the_save.__code__.co_firstlineno + 10,
    )
    assert frame.name == "test_a_traceback_points_at_the_save"
