"""Exceptions to bytes and back, and across processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from nnsight_async import BlockError
from nnsight_async.runs import exceptions, failures

ROOT = Path(__file__).parents[2]


class KeywordError(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class PrefixError(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(f"prefix {text}")


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class ReprError(Exception):
    def __reduce__(self) -> Any:
        raise RuntimeError("no way")


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def returned(error: BaseException) -> BaseException:
    return failures.unpack(failures.pack(raised(error), "a note"))


@pytest.mark.parametrize(
    "error",
    [
        KeyError("x"),
        KeywordError(code=3),
        PrefixError("x"),
        ReprError(1),
        FileNotFoundError(2, "gone", "/a"),
        ValueError(),
    ],
    ids=repr,
)
def test_type_message_arguments_and_attributes(error):
    found = returned(error)
    assert type(found) is type(error)
    assert (str(found), found.args, found.__notes__) == (str(error), error.args, ["a note"])
    assert {**vars(found), "__notes__": 0} == {**vars(error), "__notes__": 0}


def test_a_message_that_raises():
    assert type(returned(MuteError(1))) is MuteError


def test_text_that_is_not_utf8():
    error = KeyError("\ud800")
    error.add_note("\ud800")
    assert isinstance(returned(error), KeyError)


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), StopIteration(1)], ids=repr
)
def test_what_would_act_on_the_caller_arrives_as_a_block_error(error):
    found = returned(error)
    assert isinstance(found, BlockError)
    assert str(found).startswith(type(error).__name__)
    assert type(found.__cause__) is type(error)


def test_chains():
    def chained() -> None:
        try:
            {}["x"]
        except KeyError as error:
            raise PrefixError("y") from error

    with pytest.raises(PrefixError) as caught:
        chained()
    found = failures.unpack(failures.pack(caught.value, ""))
    assert isinstance(found.__cause__, KeyError)
    assert traceback.extract_tb(found.__cause__.__traceback__)[-1].line == '{}["x"]'


def test_an_endless_chain_ends():
    error = KeyError(0)
    error.__cause__ = ValueError(1)
    error.__cause__.__cause__ = error
    assert isinstance(returned(error), KeyError)


def test_the_traceback_ends_where_it_was_raised():
    entry = traceback.extract_tb(returned(KeyError("x")).__traceback__)[-1]
    assert (entry.filename, entry.name, entry.line) == (__file__, "raised", "raise error")


def called(call: Any) -> BaseException:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError


def test_the_traceback_ends_with_the_user_and_not_in_torch_or_in_this_package():
    import torch

    def user() -> None:
        torch.nn.functional.interpolate(torch.zeros(2), 3)

    assert "torch/nn" in traceback.extract_tb(called(user).__traceback__)[-1].filename
    entry = traceback.extract_tb(failures.unpack(failures.pack(called(user), "")).__traceback__)[-1]
    assert (entry.filename, entry.line) == (__file__, "torch.nn.functional.interpolate(torch.zeros(2), 3)")

    entry = traceback.extract_tb(failures.unpack(failures.pack(called(save_nowhere), "")).__traceback__)[-1]
    assert (entry.filename, entry.name) == (__file__, "save_nowhere")


def save_nowhere() -> None:
    from nnsight_async import save

    save(1)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("sav", "did you mean .save()?"),
        ("saves", "did you mean .save()?"),
        ("save", "`.save()` is understood in the text of a block; where code has no text, write save(value)"),
    ],
)
def test_a_slip_for_save_gets_a_hint(name, hint):
    import torch

    error = called(lambda: getattr(torch.zeros(1), name)())
    assert failures.unpack(failures.pack(error, "a note")).__notes__ == [hint, "a note"]


def test_other_slips_get_none():
    error = called(lambda: "text".stirp())  # type: ignore[attr-defined]
    assert failures.unpack(failures.pack(error, "a note")).__notes__ == ["a note"]


def test_one_that_was_not_raised_in_the_block_ends_where_the_block_stood():
    ours = str(ROOT / "nnsight_async/interleave/block.py")
    stood = [(ours, 1, "_main"), (__file__, 3, "block"), (__file__, 5, "helper"), (ours, 2, "read")]
    found = failures.unpack(failures.pack(ValueError("x"), "", stood), ("other.py", 1, "f"))
    assert [(entry.lineno, entry.name) for entry in traceback.extract_tb(found.__traceback__)] == [
        (3, "block"),
        (5, "helper"),
    ]


def test_one_that_was_not_raised_in_any_block_ends_where_the_block_begins():
    found = failures.unpack(failures.pack(ValueError("x"), ""), (__file__, 7, "f"))
    (entry,) = traceback.extract_tb(found.__traceback__)
    assert (entry.filename, entry.lineno, entry.name) == (__file__, 7, "f")


def test_the_traceback_keeps_nothing_of_who_receives_it():
    def receive() -> BaseException:
        return returned(KeyError("x"))

    error = receive()
    frame = error.__traceback__ and error.__traceback__.tb_frame
    around = []
    while frame is not None:
        around.append(frame.f_code.co_name)
        frame = frame.f_back
    assert "raised" in around
    assert not {"receive", "returned", "unpack"} & set(around)


def test_a_class_that_only_the_other_process_has():
    source = (
        "import sys\nfrom nnsight_async.runs import failures\n"
        "class Theirs(Exception):\n    def words(self): return 'theirs'\n"
        "sys.stdout.buffer.write(failures.pack(Theirs('x'), ''))"
    )
    packed = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, check=True).stdout
    found: Any = failures.unpack(packed)
    assert type(found).__name__ == "Theirs"
    assert found.words() == "theirs"


def test_bytes_that_cannot_be_read():
    assert exceptions.loads(b"nonsense") is None
