"""What the names by which modules travel stand for, where the model is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nnsight_async.interleave.block import BlockRun
    from nnsight_async.tree.envoy import Envoy
    from nnsight_async.tree.model import ModelView
    from nnsight_async.tree.source import Source


def resolved(reference: tuple[str, ...], model: ModelView, run: BlockRun) -> object:
    """What `reference` means in the block of `run`."""
    match reference:
        case ("model",):
            return model
        case ("tracer",):
            return run.tracer
        case ("module", path):
            return envoy_at(model.tree, path)
        case ("heads", path):
            return envoy_at(model.tree, path).heads
        case ("source", path, operation):
            run.looks_inside = True
            return _source_at(envoy_at(model.tree, path), operation)
        case ("operation", path, operation):
            run.looks_inside = True
            outer, _, name = operation.rpartition("/")
            return _source_at(envoy_at(model.tree, path), outer)[name]
        case _:
            raise ValueError(f"unknown reference {reference!r}")


def envoy_at(root: Envoy, path: str) -> Envoy:
    envoy = root
    for part in path.split(".") if path else ():
        envoy = envoy[part]
    return envoy


def _source_at(envoy: Envoy, operation: str) -> Source:
    source = envoy.source
    for name in operation.split("/") if operation else ():
        source = source[name].source
    return source
