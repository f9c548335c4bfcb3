from __future__ import annotations

import pytest

from nnsight_async.runs import echo


@pytest.fixture(autouse=True)
def _quiet():
    yield
    for key in (1, 2, 3):
        echo.forget(key)


def test_what_one_run_prints_is_printed_as_it_is(capsys):
    for text in ("a", "b\n", "c\nd"):
        echo.echo(1, text)
    echo.forget(1)
    echo.echo(2, "e")
    assert capsys.readouterr().out == "ab\nc\nde"


def test_lines_of_several_runs_have_their_number(capsys):
    echo.echo(1, "a\n")
    echo.echo(2, "b\nc\n")
    echo.echo(1, "d\n")
    echo.forget(2)
    echo.echo(1, "e\n")
    assert capsys.readouterr().out == "a\n[run 2] b\n[run 2] c\n[run 1] d\ne\n"


def test_a_line_is_of_one_run(capsys):
    echo.echo(1, "a")
    echo.echo(2, "b")
    echo.echo(2, "c\nd")
    echo.echo(3, "e")
    echo.forget(3)
    echo.echo(1, "f\n")
    assert capsys.readouterr().out == "a\n[run 2] bc\n[run 2] d\n[run 3] e\n[run 1] f\n"
