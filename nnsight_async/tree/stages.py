"""One manifest of a model whose layers are divided among the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from nnsight_async.tree.manifest import Manifest, ModuleInfo, join

if TYPE_CHECKING:
    from collections.abc import Mapping

MISSING = "PPMissingLayer"
"""The class of what stands for a module of another stage (vLLM 0.32, 0.33)."""


class Part(NamedTuple):
    """What one stage has of the model. The calls in `cut` begin on an earlier stage, or end on a later one, or both."""

    manifest: Manifest
    cut: Set[str]


class Whole(NamedTuple):
    """The model. The passages of a stage have the indices of its range `[starts[stage], starts[stage + 1])`."""

    manifest: Manifest
    starts: tuple[int, ...]
    cut: Set[str]
    """The modules that are called on several stages at once, so to say: those around the layers."""


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
    sources = {key: source for manifest in reversed(manifests) for key, source in manifest.sources.items()}
    manifest = msgspec.structs.replace(manifests[0], modules=modules, sources=sources)
    return Whole(manifest, tuple(starts), parts[0].cut)


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
        for entry, exit_ in zip(info.entries, info.exits, strict=True)
    ]
    if cut and calls:  # entered on the first stage, left on the last
        calls = [(calls[0][0], calls[-1][1])]
    return msgspec.structs.replace(
        having[stage],
        children=_children(manifests, path),
        entries=tuple(entry for entry, _ in calls),
        exits=tuple(exit_ for _, exit_ in calls),
        stage=stage,
    )


def _home(having: Mapping[int, ModuleInfo]) -> int:
    """The stage that a module is described by: where it is called, else where it is more than a stand-in."""
    real = [stage for stage, info in having.items() if info.cls != MISSING]
    called = [stage for stage in real if having[stage].entries]
    return next(iter([*called, *real, *having]))
