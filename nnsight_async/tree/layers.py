"""The layers of a model, and the width of what passes between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from nnsight_async.errors import ItemError, LocationError
from nnsight_async.interleave.locations import expression
from nnsight_async.tree.manifest import join
from nnsight_async.tree.taps import matching, meant, parsed

if TYPE_CHECKING:
    from nnsight_async.tree.manifest import Manifest
    from nnsight_async.tree.taps import Pattern


def layers(manifest: Manifest) -> tuple[str, ...]:
    """The paths of all that is an item of a list, and in no other list."""
    found: list[str] = []
    for info in manifest.modules.values():
        if info.is_list and info.alias_of is None and not any(_below(path, info.path) for path in found):
            found += [join(info.path, name) for name in info.children]
    return tuple(found)


def numbered(manifest: Manifest, number: int) -> str:
    """The path of a layer by its number in the longest list of layers, of the language model where there is one."""
    lists: dict[str, list[str]] = {}
    for path in layers(manifest):
        lists.setdefault(path.rpartition(".")[0], []).append(path)
    if not lists:
        raise LocationError("this model has no list of layers: name one, such as model.model.layers[3]")
    path, items = max(lists.items(), key=lambda found: ("language_model" in found[0], len(found[1])))
    try:
        return items[number]
    except IndexError:
        where = expression(path)
        raise ItemError(f"{where}[{number}] does not exist: {where} has {len(items)} items") from None


def declared(patterns: Sequence[str], manifest: Manifest) -> tuple[str, ...]:
    """The layers that `op_sites=` names, as `taps=` names modules; `TypeError` and `ValueError` as there."""
    check_sites(patterns)
    chosen: set[str] = set()
    for pattern in patterns:
        chosen.update(_layers_of(parsed(pattern), manifest))
    return tuple(path for path in layers(manifest) if path in chosen)


def check_sites(patterns: Sequence[Any]) -> None:
    """Raise `TypeError` for anything but a list of strings."""
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError("op_sites is a list of strings, such as ['model.layers[3]', 'model.layers[*]']")


def _layers_of(pattern: Pattern, manifest: Manifest) -> Iterator[str]:
    modules = matching(pattern.modules, manifest)
    if not modules and pattern.modules[:1] == ("model",):  # the variable
        modules = matching(pattern.modules[1:], manifest)
    if not modules:
        raise ValueError(f"op_sites: {pattern.text!r} is no place in the model{meant(pattern, manifest)}")
    known = set(layers(manifest))
    for info in modules:
        path = info.alias_of or info.path
        if path not in known or pattern.operations or pattern.kind not in ("output", "resid_post"):
            raise ValueError(
                f"op_sites: {pattern.text!r} is not a layer: declared operations act on the stream that a layer of the "
                "model leaves behind, such as model.layers[3]"
            )
        yield path


def stream_width(manifest: Manifest, path: str) -> int | None:
    """The width of the residual stream at the layer, where its norms tell; else None."""
    for name in manifest.modules[path].children:
        if "norm" in name or name.startswith("ln"):
            child = manifest.modules.get(join(path, name))
            shapes = [part.full_shape for part in child.parameters] if child is not None else []
            for shape in shapes:
                if len(shape) == 1:
                    return shape[0]
    return None


def _below(path: str, other: str) -> bool:
    return other == path or other.startswith(f"{path}.")
