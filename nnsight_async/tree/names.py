"""Paths as Python expressions, and the nearest ones to a name that does not exist."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

from nnsight_async.interleave.locations import expression
from nnsight_async.tree.manifest import join

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nnsight_async.tree.manifest import Manifest

ITEM = re.compile(r"(?<=\.)\d+(?=\.|$)")
SUGGESTIONS = 3


def nearest(manifest: Manifest, path: str, name: str) -> list[str]:
    """Up to three paths that `name`, asked of the module at `path`, may have meant: children first, then any path."""
    found = difflib.get_close_matches(name, manifest.modules[path].children, SUGGESTIONS)
    if found:
        return [join(path, child) for child in found]
    return list(dict.fromkeys(_elsewhere(manifest, path, name)))[:SUGGESTIONS]


def _elsewhere(manifest: Manifest, path: str, name: str) -> Iterator[str]:
    folded = _folded(manifest.modules)
    by_name: dict[str, list[str]] = {}
    for other in folded:
        by_name.setdefault(other.rpartition(".")[2], []).append(other)
    wanted = join(path, name)
    for close in difflib.get_close_matches(name, by_name, SUGGESTIONS, 0.75):
        yield from sorted(by_name[close], key=lambda other: (other.count("."), other))
    yield from difflib.get_close_matches(wanted, folded, SUGGESTIONS, 0.75)


def _folded(paths: Iterable[str]) -> list[str]:
    """One path of each kind: of `layers.0.mlp`, `layers.1.mlp`, ... the first."""
    first: dict[str, str] = {}
    for path in paths:
        if path:
            first.setdefault(ITEM.sub("*", path), path)
    return list(first.values())


def missing(manifest: Manifest, path: str, name: str) -> str:
    """The message for a `name` that the module at `path` does not have."""
    here = f"{expression(path)} ({manifest.modules[path].cls}) has no {name!r}"
    near = nearest(manifest, path, name)
    if near:
        return f"{here}; did you mean {' or '.join(expression(other) for other in near)}?"
    children = ", ".join(manifest.modules[path].children)
    return f"{here}; it has {children}" if children else f"{here}; it has no children"
