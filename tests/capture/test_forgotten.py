"""A name that the block assigns and does not save is warned of, where the code after the block uses it."""

from __future__ import annotations

import contextlib
import linecache
import warnings
from typing import Any

import pytest

FORGOTTEN = {
    "used after": "with trace():\n    h = 1\n    l = h.save()\nprint(h)",
    "used after in a nested function": "with trace():\n    h = 1\ndef later():\n    return h",
    "assigned in a loop": "with trace():\n    for h in [1, 2]:\n        pass\nprint(h)",
    "assigned by unpacking": "with trace():\n    h, l = 1, 2\n    l.save()\nprint(h)",
    "saved under another name": "with trace():\n    h = save(1, 'other')\nprint(h)",
    "in a branch": "with trace():\n    h = 1\nif h:\n    pass",
}

FINE = {
    "saved": "with trace():\n    h = (1).save()\nprint(h)",
    "saved by its name": "with trace():\n    h = 1\n    h.save()\nprint(h)",
    "not used": "with trace():\n    h = 1",
    "used before": "for _ in [1]:\n    h = 0\n    print(h)\n    with trace():\n        h = 1",
    "assigned before": "h = 0\nwith trace():\n    h = 1\nprint(h)",
    "assigned after": "with trace():\n    h = 1\nh = 2\nprint(h)",
    "assigned in another block": "with trace():\n    h = 1\nwith trace():\n    h = 2\n    k = h.save()\nprint(k)",
    "a parameter of what comes after": "with trace():\n    h = 1\nprint((lambda h: h)(2))",
    "a variable of a comprehension": "with trace():\n    h = 1\nprint([h for h in [1]])",
    "an exception": "with trace():\n    h = 1\ntry:\n    1 / 0\nexcept ZeroDivisionError as h:\n    print(h)",
    "in a function of the block": "with trace():\n    def f():\n        h = 1\n    k = (1).save()\nh = k\nprint(h)",
    "a name of the target": "with trace() as h:\n    k = 1\nprint(h)",
}


def program(body: str) -> str:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return f"from nnsight_async.interleave.context import save\ndef run():\n{lines}\n"


@pytest.mark.parametrize("body", FORGOTTEN.values(), ids=FORGOTTEN)
def test_is_warned_of(body: str, cell: Any, trace: Any) -> None:
    run = cell(program(body), trace=lambda: trace(run=False))["run"]

    words = r"uses 'h', which the block .* does not save.*`h\.save\(\)`"
    with pytest.warns(UserWarning, match=words) as caught, contextlib.suppress(NameError):
        run()
    (warning,) = caught
    assert "with trace" in linecache.getline(warning.filename, warning.lineno)
    used = int(str(warning.message).split()[1])
    assert "h" in linecache.getline(warning.filename, used)


@pytest.mark.parametrize("body", FINE.values(), ids=FINE)
def test_is_fine(body: str, cell: Any, trace: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cell(program(body), trace=trace)["run"]()


def test_at_the_top_of_a_file_or_cell_a_name_may_be_there_already(cell: Any, trace: Any) -> None:
    text = "with trace():\n    h = 1\nprint(h)\n"

    cell(text, trace=trace, h=0)
    with pytest.warns(UserWarning, match="line 3 uses 'h'"), pytest.raises(NameError, match="'h' is not defined"):
        cell(text, trace=trace)


def test_it_is_said_once_for_each_statement(cell: Any, trace: Any) -> None:
    run = cell(program("with trace():\n    h = 1\nprint(h)"), trace=trace)["run"]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            with pytest.raises(UnboundLocalError, match="'h'"):
                run()
    assert len(caught) == 1
