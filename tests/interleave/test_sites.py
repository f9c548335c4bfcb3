from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from nnsight_async.interleave.locations import LOGITS, Location
from nnsight_async.interleave.sites import Sites
from tests.interleave.toy import Toy

ENTRY, EXIT, OTHER = (
    Location("layers.1.mlp", "inputs"),
    Location("layers.1.mlp", "output"),
    Location("layers.2", "output"),
)


def entered(model: Toy) -> set[str]:
    return {path for path, module in model.named_modules() if "forward" in vars(module)}


def waiting(sites: Sites, listener: Any, *events: Location) -> None:
    for event in events:
        listener.waiting[event] = []
        sites.want(event)


def over(sites: Sites, listener: Any, event: Location) -> None:
    del listener.waiting[event]
    sites.release(event)


def test_a_module_is_entered_while_anything_is_wanted_of_it():
    model, listener = Toy(), SimpleNamespace(waiting={})
    sites = Sites(model, listener)
    around = {"", "layers", "layers.1"}
    waiting(sites, listener, ENTRY, EXIT, OTHER)
    assert entered(model) == around | {"layers.1.mlp", "layers.2"}
    over(sites, listener, ENTRY)
    over(sites, listener, OTHER)
    assert entered(model) == around | {"layers.1.mlp"}
    waiting(sites, listener, OTHER)
    assert entered(model) == around | {"layers.1.mlp", "layers.2"}
    over(sites, listener, EXIT)
    over(sites, listener, OTHER)
    assert not entered(model)


def test_in_a_step_modules_are_left_at_its_end():
    model, listener = Toy(), SimpleNamespace(waiting={})
    sites = Sites(model, listener)
    sites.stay()
    waiting(sites, listener, EXIT)
    over(sites, listener, EXIT)
    waiting(sites, listener, OTHER)
    assert entered(model) == {"", "layers", "layers.1", "layers.1.mlp", "layers.2"}
    sites.settle()
    assert entered(model) == {"", "layers", "layers.2"}
    waiting(sites, listener, EXIT)
    assert entered(model) == {"", "layers", "layers.1", "layers.1.mlp", "layers.2"}


def test_nothing_is_entered_for_what_no_module_passes():
    model, listener = Toy(), SimpleNamespace(waiting={})
    sites = Sites(model, listener)
    waiting(sites, listener, LOGITS)
    assert not entered(model)
    over(sites, listener, LOGITS)
    waiting(sites, listener, Location("", "output"))
    assert entered(model) == {""}


def test_what_is_held_is_entered_until_it_is_let_go():
    model, listener = Toy(), SimpleNamespace(waiting={})
    sites = Sites(model, listener)
    sites.hold("layers.2")
    sites.stay()
    waiting(sites, listener, EXIT)
    over(sites, listener, EXIT)
    sites.settle()
    assert entered(model) == {"", "layers", "layers.2"}
    waiting(sites, listener, OTHER)
    over(sites, listener, OTHER)
    assert entered(model) == {"", "layers", "layers.2"}
    sites.let_go("layers.2")
    assert not entered(model)
