"""Walks the modules of a model under all their paths."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nnsight_async.tree.manifest import join

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


def walk(module: torch.nn.Module, path: str = "", above: tuple[int, ...] = ()) -> Iterator[tuple[str, torch.nn.Module]]:
    """Every path with its module, parents first; a module that is its own descendant is not entered again.

    Unlike `named_modules`, a module that is registered twice comes under both paths.
    """
    yield path, module
    above = (*above, id(module))
    for name, child in children(module):
        if id(child) not in above:
            yield from walk(child, join(path, name), above)


def children(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The named children in order; `named_children` would leave out a second name of the same module."""
    registered: dict[str, torch.nn.Module | None] = vars(module)["_modules"]
    return [(name, child) for name, child in registered.items() if child is not None]


def paths_by_module(model: torch.nn.Module) -> list[tuple[torch.nn.Module, tuple[str, ...]]]:
    """Every module once, with all its paths, the first of them first."""
    found: dict[int, tuple[torch.nn.Module, list[str]]] = {}
    for path, module in walk(model):
        found.setdefault(id(module), (module, []))[1].append(path)
    return [(module, tuple(paths)) for module, paths in found.values()]
