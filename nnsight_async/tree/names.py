"""Paths as Python expressions, and the nearest ones to a name that does not exist."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

from nnsight_async.interleave.locations import expression
from nnsight_async.tree.manifest import join

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from nnsight_async.tree.manifest import Manifest

ITEM = re.compile(r"(?<=\.)\d+(?=\.|$)")
SUGGESTIONS = 3
PASSED = ("output", "input", "inputs", "source", "skip", "heads", "resid_pre", "resid_mid", "resid_post")
"""What every module has beside its children."""


def nearest(manifest: Manifest, path: str, name: str, others: Sequence[str] = PASSED) -> list[str]:
    """What `name`, asked of the module at `path`, may have meant: a child, one of `others`, a parameter, any path."""
    info = manifest.modules[path]
    here = expression(path)
    named = {child: expression(join(path, child)) for child in info.children}
    attributes = {other: f"{here}.{other}" for other in (*others, *(part.name for part in info.parameters))}
    close = [*difflib.get_close_matches(name, named, SUGGESTIONS), *similar(name, attributes)]
    if close:
        ranked = difflib.get_close_matches(name, close, SUGGESTIONS)
        return [({**attributes, **named})[other] for other in ranked]
    return list(dict.fromkeys(map(expression, _elsewhere(manifest, path, name))))[:SUGGESTIONS]


def similar(name: str, names: Iterable[str]) -> list[str]:
    """Those of `names` that `name` may be a slip for."""
    return difflib.get_close_matches(name, list(names), SUGGESTIONS, 0.75)


def unsettable(here: str, name: str, settable: Sequence[str]) -> str:
    """The message for an assignment to `name` of what is written `here`."""
    near = similar(name, settable)
    instead = f"did you mean {here}.{near[0]}?" if near else f"{', '.join(settable)} can"
    return f"{here}.{name} cannot be set; {instead}"


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


def missing(manifest: Manifest, path: str, name: str, others: Sequence[str] = PASSED) -> str:
    """The message for a `name` that the module at `path` does not have."""
    if any(name == part.name for part in manifest.modules[path].parameters):
        return f"{expression(path)}.{name} is a parameter of the real module: it can be read inside a block"
    here = f"{expression(path)} ({manifest.modules[path].cls}) has no {name!r}"
    near = nearest(manifest, path, name, others)
    if near:
        return f"{here}; did you mean {' or '.join(near)}?"
    children = ", ".join(manifest.modules[path].children)
    return f"{here}; it has {children}" if children else f"{here}; it has no children"
