"""The tree as it is shown: a run of identical items of a list is one node."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from nnsight_async.tree.manifest import join

if TYPE_CHECKING:
    from collections.abc import Hashable

    from nnsight_async.tree.manifest import Manifest, ModuleInfo


@dataclass(frozen=True, slots=True)
class Node:
    """A module as shown: `label` is its name, or the range of `count` items that look the same."""

    label: str
    count: int
    info: ModuleInfo
    children: tuple[Node, ...]


def fold(manifest: Manifest, path: str) -> Node:
    """The tree below `path`."""
    return Folder(manifest).node(path, manifest.modules[path].name if path else "")


class Folder:
    """Tells which modules look the same."""

    def __init__(self, manifest: Manifest) -> None:
        self._modules = manifest.modules
        self._looks: dict[str, int] = {}
        self._known: dict[Hashable, int] = {}

    def node(self, path: str, label: str, count: int = 1) -> Node:
        """The node of the module at `path` with its children folded."""
        info = self._modules[path]
        if not info.is_list:
            children = tuple(self.node(join(path, name), name) for name in info.children)
            return Node(label, count, info, children)
        runs = groupby(info.children, lambda name: self._look(join(path, name)))
        return Node(label, count, info, tuple(self._run(path, list(names)) for _, names in runs))

    def _run(self, path: str, names: list[str]) -> Node:
        label = names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"
        return self.node(join(path, names[0]), label, len(names))

    def _look(self, path: str) -> int:
        if path not in self._looks:
            info = self._modules[path]
            shared = bool(info.alias_of is not None or info.aliases)
            below = tuple((name, self._look(join(path, name))) for name in info.children)
            # One module under many paths is readable at the first only; that alone does not set its parents apart.
            look = (info.cls, info.extra, info.parameters, shared or info.reason, below)
            self._looks[path] = self._known.setdefault(look, len(self._known))
        return self._looks[path]
