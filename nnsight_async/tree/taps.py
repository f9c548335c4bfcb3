"""What is written in `taps=`, as locations of a model."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from nnsight_async.errors import LocationError
from nnsight_async.interleave.locations import Location, expression
from nnsight_async.tree.heads import heads_below
from nnsight_async.tree.names import missing
from nnsight_async.tree.residual import layer, middle_norm

if TYPE_CHECKING:
    from nnsight_async.tree.manifest import Manifest, ModuleInfo

INDEX = re.compile(r"\[\s*['\"]?([\w*]+)['\"]?\s*\]")
SUGGESTIONS = 3


class Pattern(NamedTuple):
    """A tap as it was written, taken apart."""

    modules: tuple[str, ...]
    operations: tuple[str, ...]
    kind: str
    text: str


def resolve(taps: Sequence[str], manifest: Manifest) -> tuple[Location, ...]:
    """The locations that `taps` stand for, each once, in the order of the model.

    A tap is a path as blocks write it, `model.layers[3].mlp.output` (with or without the variable that holds the
    model), where `*` stands for any name or index, or a part of one: `layers[*].self_attn.output`. It ends with
    `.output`, `.input`, `.inputs`, `.resid_pre`, `.resid_mid`, `.resid_post` or `.heads`, and is an output where it
    ends with a module; `.source.NAME` in front of that is an operation. Raises `TypeError` for anything but strings,
    and `ValueError` for what the model does not have, with what it may have meant.
    """
    check_taps(taps)
    found: set[Location] = set()
    for tap in taps:
        found.update(_locations(parsed(tap), manifest))
    places = {path: number for number, path in enumerate(manifest.modules)}
    return tuple(sorted(found, key=lambda event: (places[event.path], event.operation, event.kind)))


def check_taps(taps: Sequence[Any]) -> None:
    """Raise `TypeError` for anything but a list of strings."""
    if isinstance(taps, str) or not all(isinstance(tap, str) for tap in taps):
        raise TypeError("taps is a list of strings, such as ['model.layers[3].mlp.output', 'model.layers[*].output']")


def parsed(tap: str) -> Pattern:
    parts = [part for part in INDEX.sub(r".\1", tap).strip().split(".") if part]
    kind = parts.pop() if parts and parts[-1] in KINDS else "output"
    if "heads" in parts:  # those of one head pass with the others
        parts, kind = parts[: parts.index("heads")], "heads"
    at = parts.index("source") if "source" in parts else len(parts)
    return Pattern(tuple(parts[:at]), tuple(part for part in parts[at:] if part != "source"), kind, tap)


def _locations(pattern: Pattern, manifest: Manifest) -> Iterator[Location]:
    if not pattern.text.strip():
        raise ValueError("taps: an empty string is no place in the model")
    modules = matching(pattern.modules, manifest)
    if not modules and pattern.modules[:1] == ("model",):  # the variable
        modules = matching(pattern.modules[1:], manifest)
    if not modules:
        raise ValueError(f"taps: {pattern.text!r} is no place in the model{meant(pattern, manifest)}")
    refused: list[Exception] = []
    some = False
    for info in modules:
        try:
            for location in _of_module(pattern, info, manifest):
                some = True
                yield location
        except (LocationError, ValueError) as error:
            refused.append(error)
    if not some:
        raise ValueError(f"taps: {pattern.text!r}: {refused[0]}") from refused[0]


def matching(parts: Sequence[str], manifest: Manifest) -> list[ModuleInfo]:
    """The modules that the parts of a pattern stand for, under any of their names."""
    return [
        info
        for path, info in manifest.modules.items()
        if any(_matches(parts, name.split(".") if name else []) for name in _names(path, manifest))
    ]


def _names(path: str, manifest: Manifest) -> list[str]:
    """The path, and it with the names that `rename` has given."""
    names = [path]
    for alias, renamed in manifest.renames.items():
        if "." not in renamed:
            names += [".".join(alias if part == renamed else part for part in name.split(".")) for name in names]
        elif f"{path}.".startswith(f"{renamed}."):
            names.append(f"{alias}{path.removeprefix(renamed)}")
    return names


def _matches(parts: Sequence[str], names: Sequence[str]) -> bool:
    return len(parts) == len(names) and all(map(fnmatchcase, names, parts))


def _of_module(pattern: Pattern, info: ModuleInfo, manifest: Manifest) -> Iterable[Location]:
    if info.reason is not None:
        raise ValueError(f"{expression(info.path)} cannot be read: {info.reason}")
    path = info.alias_of or info.path
    if not pattern.operations:
        return KINDS[pattern.kind](manifest, path)
    if pattern.kind not in ("output", "input", "inputs"):
        raise ValueError(f"an operation has .output, .input and .inputs, and no .{pattern.kind}")
    kind = "output" if pattern.kind == "output" else "inputs"
    return [Location(path, kind, name) for name in _operations(pattern.operations, info, manifest)]


def _operations(parts: Sequence[str], info: ModuleInfo, manifest: Manifest) -> Iterator[str]:
    if info.source is None:
        raise ValueError(f"{expression(info.path)} has no operations: {info.sourceless or 'its forward is not known'}")
    inside: list[tuple[str, str | None]] = [("", info.source)]
    for part in parts:
        listed = [
            (f"{before}/{operation.name}".strip("/"), operation)
            for before, key in inside
            for operation in (manifest.sources[key].operations if key in manifest.sources else ())
        ]
        fitting = [(name, operation.inside) for name, operation in listed if fnmatchcase(operation.name, part)]
        if not fitting:
            names = ", ".join(operation.name for _, operation in listed) or "none"
            raise ValueError(f"{expression(info.path)} has no operation {part!r}; it has {names}")
        inside = fitting
    yield from (name for name, _ in inside)


def meant(pattern: Pattern, manifest: Manifest) -> str:
    path = ""
    for part in pattern.modules if "*" not in "".join(pattern.modules) else ():
        inner = f"{path}.{part}".strip(".")
        if inner not in manifest.modules:
            return f": {missing(manifest, path, part)}"
        path = inner
    wanted = ".".join(pattern.modules)
    near = difflib.get_close_matches(wanted, manifest.modules, SUGGESTIONS, 0.5)
    return f"; did you mean {' or '.join(map(expression, near))}?" if near else ""


def _heads(manifest: Manifest, path: str) -> list[Location]:
    attention = heads_below(manifest, path).path
    return [Location(attention, "inputs"), Location(attention, "output")]


KINDS: dict[str, Callable[[Manifest, str], list[Location]]] = {
    "output": lambda manifest, path: [Location(path, "output")],
    "input": lambda manifest, path: [Location(path, "inputs")],
    "inputs": lambda manifest, path: [Location(path, "inputs")],
    "resid_pre": lambda manifest, path: [Location(layer(manifest, path), "inputs")],
    "resid_mid": lambda manifest, path: [Location(middle_norm(manifest, path), "inputs")],
    "resid_post": lambda manifest, path: [Location(layer(manifest, path), "output")],
    "heads": _heads,
}
"""What a tap may end with, and the places where a pass stops for it."""
