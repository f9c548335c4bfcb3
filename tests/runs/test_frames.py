from __future__ import annotations

import enum

import numpy as np
import pytest
import torch

from nnsight_async.errors import SaveError
from nnsight_async.runs import frames
from nnsight_async.runs.frames import Frame, Message, Together
from nnsight_async.runs.packing import Tensors, pack


def sent(value: object) -> object:
    (received,) = sent_together(value)
    return received


def sent_together(*values: object) -> list[object]:
    tensors = Tensors()
    packed = [Frame(key, 0, [("x", "set", pack(value, tensors))]) for key, value in enumerate(values)]
    message = Message(tensors.kinds, packed)
    received = frames.decode([bytes(part) for part in frames.encode(message, tensors.join())])
    assert [frame.key for frame in received] == list(range(len(values)))
    return [frame.entries[0][2] for frame in received]


@pytest.mark.parametrize(
    "value",
    [None, True, 3, -(1 << 80), 1 << 63, 2.5, "naïve", b"\x00", [1, (2, "b")], {"a": [1], 3: None}, (), {}],
    ids=repr,
)
def test_plain_values_come_back_equal(value):
    received = sent(value)
    assert received == value
    assert type(received) is type(value)


class Color(enum.IntEnum):
    RED = 3


@pytest.mark.parametrize(("value", "plain"), [(np.float64(2.5), 2.5), (Color.RED, 3), (np.str_("a"), "a")], ids=repr)
def test_subclasses_come_back_as_what_they_are_underneath(value, plain):
    assert sent(value) == plain
    assert type(sent(value)) is type(plain)


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 3)], ids=str)
def test_tensors_keep_dtype_shape_and_bits(dtype, shape):
    value = (torch.rand(shape) * 9).to(dtype)
    received = sent(value)
    assert isinstance(received, torch.Tensor)
    assert (received.dtype, received.shape) == (dtype, value.shape)
    assert received.flatten().view(torch.uint8).tolist() == value.flatten().view(torch.uint8).tolist()


def test_tensors_that_are_views():
    whole = torch.arange(12.0).reshape(3, 4)
    for view in (whole.T, whole[:, 1], whole[::2], whole[0, 0].expand(5), torch.tensor([1 + 2j]).conj()):
        for received in [sent(view), *sent_together(view, view)]:
            assert isinstance(received, torch.Tensor)
            assert torch.equal(received, view)


def test_tensors_of_several_runs_travel_together_and_come_back_apart():
    values = [
        torch.arange(3.0),
        torch.arange(2),
        torch.ones(2, 2),
        [torch.zeros(()), torch.tensor([5.0])],
        torch.empty(0),
    ]
    received = sent_together(*values)
    first, second, third, (fourth, fifth), sixth = received
    for got, expected in zip(
        [first, second, third, fourth, fifth, sixth], [*values[:3], *values[3], values[4]], strict=True
    ):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
    third += 1
    assert torch.equal(first, values[0])
    assert first.untyped_storage().nbytes() == first.nbytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("buffer", [bytes, bytearray])
def test_tensors_of_one_shape_come_back_each_with_memory_of_its_own(dtype, shape, buffer):
    values = [(torch.rand(shape) * 9).to(dtype) for _ in range(5)]
    tensors = Tensors()
    packed = [Frame(0, 0, [(str(index), "set", pack(value, tensors))]) for index, value in enumerate(values)]
    parts = frames.encode(Message(tensors.kinds, packed), tensors.join())
    received = [frame.entries[0][2] for frame in frames.decode([buffer(part) for part in parts])]
    for got, value in zip(received, values, strict=True):
        assert (got.dtype, got.shape) == (dtype, value.shape)
        assert got.untyped_storage().nbytes() == value.nbytes
        assert not got.is_inference()
        assert bytes(got.flatten().view(torch.uint8).tolist()) == bytes(value.flatten().view(torch.uint8).tolist())
        got.zero_()  # the others notice nothing


def test_what_is_joined_is_a_copy():
    value, tensors = torch.ones(2), Tensors()
    pack(value, tensors)
    (flat,) = tensors.join()
    value.zero_()
    assert flat.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("value", [torch.eye(2).to_sparse(), torch.empty(2, device="meta")], ids=["sparse", "meta"])
def test_a_tensor_without_dense_data_is_refused(value):
    with pytest.raises(SaveError, match="dense"):
        pack(value, Tensors())


@pytest.mark.parametrize("parts", [[], [b""], [b"\xff"], [b"\x91\x91\x01"]])
def test_a_malformed_message_is_a_value_error(parts):
    with pytest.raises(ValueError, match="malformed"):
        frames.decode(parts)


def test_a_message_for_another_inbox_is_a_value_error():
    parts = [bytes(part) for part in frames.encode(Message([], [Frame(1, 0)], "ipc:///a/inbox-0"), [])]
    assert [frame.key for frame in frames.decode(parts, "ipc:///a/inbox-0")] == [1]
    with pytest.raises(ValueError, match="another engine"):
        frames.decode(parts, "ipc:///b/inbox-0")


DAMAGED = [3, [], ["unheard"], ["list", 3], ["dict", [[["list", []], ["plain", 1]]]], ["big", "x"], ["plain"]]
DAMAGED += [
    ["tensor", 0, offset, shape] for offset, shape in [(0, [9]), (1, [2]), ("a", [1]), (0, [1 << 63]), (0, [-3])]
]
DAMAGED += [["tensor", 5, 0, [1]]]


@pytest.mark.parametrize("value", DAMAGED, ids=repr)
def test_values_that_cannot_be_read_are_their_own_frames_alone(value):
    tensors = Tensors()
    good = pack(torch.tensor([1.0, 2.0]), tensors)
    sound, damaged = Frame(1, 0, [("x", "set", good)]), Frame(2, 0, [("x", "set", value)])
    parts = frames.encode(Message(tensors.kinds, [damaged, sound]), tensors.join())
    bad, whole = frames.decode([bytes(part) for part in parts])
    assert bad.damaged
    assert not bad.entries
    assert not whole.damaged
    assert whole.entries[0][2].tolist() == [1.0, 2.0]


def test_a_truncated_buffer_is_the_loss_of_those_whose_rows_are_gone():
    tensors = Tensors()
    packed = [Frame(key, 0, [("x", "set", pack(torch.full((2,), float(key)), tensors))]) for key in (1, 2)]
    header, flat = (bytes(part) for part in frames.encode(Message(tensors.kinds, packed), tensors.join()))
    first, second = frames.decode([header, flat[:12]])
    assert first.entries[0][2].tolist() == [1.0, 1.0]
    assert second.damaged
    assert all(frame.damaged for frame in frames.decode([header]))


def of_several(*values: object, keys: int = 3, numbers: int = 3) -> tuple[Message, list[torch.Tensor]]:
    """A message in which three runs have saved values together, each tensor with an item for each."""
    tensors = Tensors()
    entries = [(f"v{number}", "set", pack(value, tensors, together=True)) for number, value in enumerate(values)]
    found = Together(list(range(10, 10 + keys)), [4, 0, 7], list(range(5, 5 + numbers)), 2, entries, 24)
    return Message(tensors.kinds, [], together=[found]), tensors.join()


def arrived(message: Message, flats: list[torch.Tensor]) -> list[Frame]:
    return frames.decode([bytearray(part) for part in frames.encode(message, flats)])


@pytest.mark.parametrize("other", [torch.arange(6.0).view(3, 2), torch.arange(12).view(3, 4), torch.rand(3, 2, 2)])
def test_what_runs_save_together_comes_back_as_each_ones(other):
    rows = torch.arange(6.0).view(3, 2) + 10
    value = [rows, (other, 5, "text"), {"k": rows[:, 0].clone(), 3: []}, None]
    received = arrived(*of_several(rows, value, ()))
    assert [(frame.key, frame.step, frame.number) for frame in received] == [(10, 6, 7), (11, 2, 8), (12, 9, 9)]
    for index, frame in enumerate(received):
        assert (frame.size, frame.damaged, frame.done, frame.part) == (24, "", False, 0)
        assert [(name, operation) for name, operation, _ in frame.entries] == [(f"v{n}", "set") for n in range(3)]
        first, (again, (beside, number, text), kept, nothing), empty = (value for *_, value in frame.entries)
        torch.testing.assert_close(first, rows[index])
        torch.testing.assert_close(again, rows[index])
        torch.testing.assert_close(beside, other[index])
        torch.testing.assert_close(kept["k"], rows[index, 0])
        assert (number, text, kept[3], nothing, empty) == (5, "text", [], None, ())
    values = [value for frame in received for value in (frame.entries[0][2], frame.entries[1][2][0])]
    assert len({tensor.data_ptr() for tensor in values}) == 6
    lists = [frame.entries[1][2] for frame in received]
    assert len({id(each) for each in lists} | {id(each[2]) for each in lists} | {id(each[2][3]) for each in lists}) == 9


def test_values_of_several_runs_that_are_cut_short_are_missed_by_all():
    message, (flat,) = of_several(torch.arange(6.0).view(3, 2))
    for frame in arrived(message, [flat[:4]]):
        assert frame.damaged
        assert not frame.entries


def test_runs_without_a_step_or_number_are_no_message():
    with pytest.raises(ValueError, match="malformed"):
        arrived(*of_several(torch.arange(6.0).view(3, 2), numbers=2))
