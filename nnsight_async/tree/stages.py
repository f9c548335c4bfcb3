"""One manifest of a model whose layers are divided among the stages of a pipeline."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from nnsight_async.interleave.locations import expression
from nnsight_async.tree.manifest import Manifest, ModuleInfo, join

if TYPE_CHECKING:
    from collections.abc import Mapping

MISSING = "PPMissingLayer"
"""The class of what stands for a module of another stage (vLLM 0.32, 0.33)."""


class Part(NamedTuple):
    """What one stage has of the model. The calls in `cut` begin on an earlier stage, or end on a later one, or both."""

    manifest: Manifest
    cut: AbstractSet[str]


class Whole(NamedTuple):
    """The model. The passages of a stage have the indices of its range `[starts[stage], starts[stage + 1])`."""

    manifest: Manifest
    starts: tuple[int, ...]
    cut: AbstractSet[str]
    """The modules that are called on several stages at once, so to say: those around the layers."""
    shared: Mapping[str, str]
    """By the path of a module its first one, if it is one that all stages have: where the model is on one, they are one
    module with several paths, such as a rotary embedding that all layers share."""


def whole(parts: Sequence[Part]) -> Whole:
    """What the stages have, put together in their order."""
    starts = [0]
    for part in parts:
        ends = (index for info in part.manifest.modules.values() for index in info.exits)
        starts.append(starts[-1] + max(ends, default=-1) + 1)
    manifests = [part.manifest for part in parts]
    modules: dict[str, ModuleInfo] = {}
    for path in _paths(manifests):
        modules[path] = _merged(path, manifests, starts, cut=path in parts[0].cut)
    shared = _shared(manifests, modules)
    _put_together(modules, shared)
    sources = {key: source for manifest in reversed(manifests) for key, source in manifest.sources.items()}
    manifest = msgspec.structs.replace(manifests[0], modules=modules, sources=sources)
    return Whole(manifest, tuple(starts), parts[0].cut, shared)


def _paths(manifests: Sequence[Manifest], path: str = "") -> Iterator[str]:
    """All paths, parents first, each child where the first stage that has it has it."""
    yield path
    for name in _children(manifests, path):
        yield from _paths(manifests, join(path, name))


def _children(manifests: Sequence[Manifest], path: str) -> tuple[str, ...]:
    found = (manifest.modules[path].children for manifest in manifests if path in manifest.modules)
    return tuple(dict.fromkeys(name for children in found for name in children))


def _merged(path: str, manifests: Sequence[Manifest], starts: Sequence[int], *, cut: bool) -> ModuleInfo:
    having = {stage: each.modules[path] for stage, each in enumerate(manifests) if path in each.modules}
    stage = _home(having)
    calls = [
        (entry + starts[where], exit_ + starts[where])
        for where, info in having.items()
        for entry, exit_ in _calls(info)
    ]
    if cut and calls:  # entered on the first stage, left on the last
        calls = [(calls[0][0], calls[-1][1])]
    info = msgspec.structs.replace(having[stage], children=_children(manifests, path), stage=stage)
    return _with_calls(info, calls)


def _shared(manifests: Sequence[Manifest], modules: Mapping[str, ModuleInfo]) -> dict[str, str]:
    """By path the first one, of modules without weights that layers share on their stages, and so would on one."""
    groups: dict[tuple[str, ...], list[ModuleInfo]] = {}
    for info in (modules[path] for manifest in manifests for path in manifest.modules):
        if info.alias_of is None and info.cls != MISSING and not info.parameters:
            kind = re.sub(r"\d+", "0", info.path)
            group = groups.setdefault((kind, info.qualified, info.extra), [])
            if all(info.stage != other.stage for other in group):
                group.append(info)
    several = [group for group in groups.values() if len(group) > 1 and any(info.aliases for info in group)]
    return {path: group[0].path for group in several for info in group for path in (info.path, *info.aliases)}


def _put_together(modules: dict[str, ModuleInfo], shared: Mapping[str, str]) -> None:
    """Have the shared modules of several stages be one with several paths."""
    for first in dict.fromkeys(shared.values()):
        paths = [path for path, to in shared.items() if to == first]
        infos = [modules[path] for path in paths]
        calls = sorted({call for info in infos for call in _calls(info)})
        reason = f"the same module as {expression(first)}; read it there"
        for info in infos:
            by_others = {call for other in info.aliases for call in _calls(modules[other])}
            own = [call for call in _calls(info) if call not in by_others]
            alias = msgspec.structs.replace(info, alias_of=first, aliases=(), reachable=False, reason=reason)
            modules[info.path] = _with_calls(alias, own)
        whole = msgspec.structs.replace(infos[0], aliases=tuple(paths[1:]))
        modules[first] = _with_calls(whole, calls)
        for path in paths[1:]:
            modules[path] = msgspec.structs.replace(modules[path], alias_of=first, reason=reason)


def _calls(info: ModuleInfo) -> list[tuple[int, int]]:
    return list(zip(info.entries, info.exits, strict=True))


def _with_calls(info: ModuleInfo, calls: Sequence[tuple[int, int]]) -> ModuleInfo:
    entries, exits = tuple(entry for entry, _ in calls), tuple(exit_ for _, exit_ in calls)
    return msgspec.structs.replace(info, entries=entries, exits=exits)


def _home(having: Mapping[int, ModuleInfo]) -> int:
    """The stage that a module is described by: where it is called, else where it is more than a stand-in."""
    real = [stage for stage, info in having.items() if info.cls != MISSING]
    called = [stage for stage in real if having[stage].entries]
    return next(iter([*called, *real, *having]))
