from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnsight_async.errors import SaveError
from nnsight_async.interleave.saving import DEEPEST, Saves
from nnsight_async.runs.packing import Tensors, pack, unpack


@pytest.fixture(params=[False, True], ids=["no_grad", "inference_mode"], autouse=True)
def _mode(request: pytest.FixtureRequest):
    """Blocks run in inference mode in vLLM, and without it elsewhere."""
    with torch.no_grad(), torch.inference_mode(request.param):
        yield


def collected(saves: Saves) -> list[tuple[str, str, Any]]:
    return [(entry.name, entry.operation, entry.value) for entry in saves.collect()]


def test_a_value_is_sent_once():
    saves = Saves(1000)
    saves.add("x", 3)
    assert collected(saves) == [("x", "set", 3)]
    assert collected(saves) == []


def test_what_is_done_to_a_tensor_after_its_save_is_not_saved():
    saves, value = Saves(1000), torch.zeros(2)
    pair = (torch.zeros(1), value)
    saves.add("value", value)
    saves.add("view", value[1:])
    saves.add("pair", pair)
    value += 100
    sent = {name: sent for name, _, sent in collected(saves)}
    assert torch.equal(sent["value"], torch.zeros(2))
    assert torch.equal(sent["view"], torch.zeros(1))
    assert torch.equal(sent["pair"][1], torch.zeros(2))


def test_lists_in_a_tuple_are_followed():
    saves = Saves(1000)
    norms: list[int] = []
    tops: list[int] = []
    saves.add("pair", (norms, tops))
    saves.add("nested", [(norms,)])
    assert collected(saves) == [("pair", "set", ([], [])), ("nested", "set", [([],)])]
    norms.append(3)
    tops.append(5)
    assert collected(saves) == [("pair", "set", ([3], [5])), ("nested", "set", [([3],)])]
    saves.add("flat", (1, torch.zeros(2)))
    assert [name for name, *_ in collected(saves)] == ["pair", "nested", "flat"]
    assert [name for name, *_ in collected(saves)] == ["pair", "nested"]


def test_of_a_list_only_what_was_appended_is_sent():
    saves, values = Saves(1000), [1]
    saves.add("x", values)
    assert collected(saves) == [("x", "set", [1])]
    assert collected(saves) == []
    values += [2, 3]
    assert collected(saves) == [("x", "extend", [2, 3])]
    values.append(4)
    assert collected(saves) == [("x", "extend", [4])]


def test_a_list_that_changed_otherwise_is_sent_whole():
    saves, values = Saves(1000), [torch.zeros(1), torch.ones(1)]
    saves.add("x", values)
    saves.collect()
    values[0] = torch.ones(1)
    ((_, operation, sent),) = collected(saves)
    assert (operation, [tensor.item() for tensor in sent]) == ("set", [1.0, 1.0])
    del values[0]
    ((_, operation, sent),) = collected(saves)
    assert (operation, len(sent)) == ("set", 1)
    assert collected(saves) == []


def test_of_a_dict_only_new_keys_are_sent():
    saves, values = Saves(1000), {"a": 1}
    saves.add("x", values)
    saves.collect()
    values["b"] = 2
    assert collected(saves) == [("x", "update", {"b": 2})]
    values["a"] = 9
    assert collected(saves) == [("x", "set", {"a": 9, "b": 2})]


def test_what_cannot_be_saved_is_named():
    saves, round_and_round = Saves(1000), [1]
    round_and_round.append(round_and_round)  # type: ignore[arg-type]
    with pytest.raises(SaveError, match=r"'mask' holds a tensor of torch\.sparse_coo; .*to_dense"):
        saves.add("mask", [torch.eye(2).to_sparse()])
    with pytest.raises(SaveError, match="'x' holds itself"):
        saves.add("x", round_and_round)
    values: list[Any] = []
    saves.add("y", values)
    saves.collect()
    values.append({"me": values})
    with pytest.raises(SaveError, match="'y' holds itself"):
        saves.collect()


def test_containers_in_one_another_may_be_deep():
    saves, deep = Saves(1000), [1]
    for _ in range(DEEPEST - 1):
        deep = [deep]  # type: ignore[list-item]
    saves.add("x", deep)
    assert len(collected(saves)) == 1
    assert unpack(pack(deep, Tensors()), []) == deep
    with pytest.raises(SaveError, match="more than 100 deep"):
        saves.add("y", [deep])


def test_a_container_in_a_container_is_sent_whole_at_every_step():
    saves, inner = Saves(1000), [1]
    values: list[Any] = [0]
    saves.add("x", values)
    saves.collect()
    values.append(inner)
    assert collected(saves) == [("x", "extend", [[1]])]
    inner.append(2)
    assert collected(saves) == [("x", "set", [0, [1, 2]])]
    values.pop()
    assert collected(saves) == [("x", "set", [0])]
    assert collected(saves) == []


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "+=": lambda tensor: tensor.add_(1),
    "an item": lambda tensor: tensor.__setitem__(0, 1.0),
    "a view": lambda tensor: tensor.view(-1)[:2].fill_(1),
    "out=": lambda tensor: torch.maximum(tensor, torch.ones(2, 2), out=tensor),
    "foreach": lambda tensor: torch._foreach_add_([tensor], 1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("held", [lambda t: [0, t], lambda t: {"a": 0, "sum": t}, lambda t: [(t, 1)]])
def test_a_tensor_in_a_container_that_is_changed_in_place_is_sent_again(change: Any, held: Any):
    saves, tensor = Saves(1000), torch.zeros(2, 2)
    container = held(tensor)
    saves.add("x", container)
    saves.collect()
    assert collected(saves) == []
    for _ in range(2):
        tensor.zero_()
        change(tensor)
        assert collected(saves) == [("x", "set", container)]
        assert collected(saves) == []
    assert tensor[0, 0] == 1


def test_one_that_was_added_later_is_sent_again_too():
    saves, first, second = Saves(1000), torch.zeros(2), torch.zeros(2) + 1
    values: list[Any] = []
    saves.add("x", values)
    saves.collect()
    values += [first, second]
    assert [operation for _, operation, _ in collected(saves)] == ["extend"]
    assert (values[0] is first, values[1] is second) == (True, True)
    second /= 2
    ((_, operation, sent),) = collected(saves)
    assert (operation, sent[1].tolist()) == ("set", [0.5, 0.5])
    del values[1]
    assert [operation for _, operation, _ in collected(saves)] == ["set"]
    second += 1
    assert collected(saves) == []


def test_what_a_module_may_change_is_watched_from_its_first_use():
    saves, tensor = Saves(1000, at_once=False), torch.zeros(2)
    saves.add("x", [tensor])
    saves.collect()
    saves.copy_at_once()
    assert collected(saves) == []
    tensor += 1
    ((_, _, sent),) = collected(saves)
    assert sent[0].tolist() == [1, 1]


def test_tensors_that_are_more_than_their_memory_stay_what_they_are():
    saves = Saves(1000)
    named, conjugate, referred = torch.zeros(2), torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2)
    named.note = "mine"  # type: ignore[attr-defined]
    reference = weakref.ref(referred)
    values = [named, conjugate, referred, torch.nn.Parameter(torch.ones(2), requires_grad=False)]
    saves.add("x", values)
    saves.collect()
    assert (named.note, conjugate.is_conj(), reference() is values[2]) == ("mine", True, True)  # type: ignore[attr-defined]
    assert isinstance(values[3], torch.nn.Parameter)
