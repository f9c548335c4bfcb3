from __future__ import annotations

from typing import Any

import torch

from nnsight_async.interleave.saving import Saves


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
