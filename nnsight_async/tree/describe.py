"""Makes the manifest of a model where the model is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nnsight_async.tree.listing import Listing
from nnsight_async.tree.manifest import Manifest, ModuleInfo, ParameterInfo, join
from nnsight_async.tree.reading import unreadable_because
from nnsight_async.tree.sharding import shapes
from nnsight_async.tree.walk import children, paths_by_module, walk

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nnsight_async.tree.record import Calls

NEVER = ((), ())


def describe(
    model: torch.nn.Module,
    *,
    repo: str = "",
    vllm_version: str = "",
    calls: Mapping[str, Calls] | None = None,
    whole: bool = True,
) -> Manifest:
    """The manifest of `model`, which may be on any device, `meta` included; only names and shapes are looked at.

    `calls` is what `record` returned for a forward pass of the same model. Without it the manifest is not `recorded`,
    and modules are taken to be readable unless their class says otherwise; so are those that were not called, if the
    pass was not a `whole` one.
    """
    paths = {id(module): paths for module, paths in paths_by_module(model)}
    known = dict(walk(model))
    listing = Listing()
    modules = {
        path: _module(path, module, paths[id(module)], known, calls, listing, whole) for path, module in known.items()
    }
    recorded = calls is not None
    return Manifest(repo=repo, vllm_version=vllm_version, modules=modules, recorded=recorded, sources=listing.sources)


def _module(
    path: str,
    module: torch.nn.Module,
    paths: tuple[str, ...],
    known: Mapping[str, torch.nn.Module],
    calls: Mapping[str, Calls] | None,
    listing: Listing,
    whole: bool,
) -> ModuleInfo:
    entries, exits = NEVER if calls is None else calls.get(path, NEVER)
    called = None if calls is None or not (whole or entries) else bool(entries)
    reason = unreadable_because(path, module, paths, called=called)
    cls = type(module)
    source, sourceless = listing.forward(module)
    return ModuleInfo(
        path=path,
        cls=cls.__name__,
        qualified=_qualified(cls),
        bases=tuple(_qualified(base) for base in cls.__mro__[1:] if issubclass(base, torch.nn.Module)),
        children=tuple(name for name, _ in children(module) if join(path, name) in known),
        parameters=tuple(_parameter(module, name, value) for name, value in module.named_parameters(recurse=False)),
        is_list=isinstance(module, torch.nn.ModuleList | torch.nn.Sequential),
        extra=_extra(module),
        reachable=reason is None,
        reason=reason,
        entries=entries,
        exits=exits,
        alias_of=None if path == paths[0] else paths[0],
        aliases=paths[1:] if path == paths[0] else (),
        torch_hooks=cls.__call__ is torch.nn.Module.__call__,
        source=source,
        sourceless=sourceless,
    )


def _qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _parameter(module: torch.nn.Module, name: str, value: torch.Tensor) -> ParameterInfo:
    shape, full_shape, shard_dim = shapes(module, name, value)
    dtype = str(value.dtype).removeprefix("torch.")
    return ParameterInfo(name, shape, dtype, full_shape, shard_dim)


def _extra(module: torch.nn.Module) -> str:
    # Foreign code, and some of it formats weights that a quantisation method has removed.
    try:
        return " ".join(module.extra_repr().split())
    except Exception:
        return ""
