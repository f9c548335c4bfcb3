"""Where the residual stream of a decoder layer is read and written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nnsight_async.errors import LocationError
from nnsight_async.interleave.context import current
from nnsight_async.interleave.locations import Location, expression
from nnsight_async.interleave.views import StreamIn, StreamOut, View
from nnsight_async.tree.manifest import join

if TYPE_CHECKING:
    from nnsight_async.tree.manifest import Manifest

Place = tuple[Location, View]

MIDDLE_NORMS = ("pre_feedforward_layernorm", "post_attention_layernorm", "ln_2")
"""Norms that take the stream between attention and MLP, by the names that vLLM's layers use (0.32, 0.33). Gemma's
layers have the first two, and there only the first one takes the stream."""


def before(manifest: Manifest, path: str) -> Place:
    """The stream that the layer is called with."""
    _check_layer(manifest, path)
    return Location(path, "inputs"), StreamIn.of(current().module(path))


def middle(manifest: Manifest, path: str) -> Place:
    """The stream between attention and MLP."""
    _check_layer(manifest, path)
    children = manifest.modules[path].children
    norm = next((name for name in MIDDLE_NORMS if name in children), None)
    if norm is None or (norm == "post_attention_layernorm" and "post_feedforward_layernorm" in children):
        kind = manifest.modules[path].cls
        raise LocationError(f"{expression(path)} ({kind}) has no norm between attention and MLP, and so no resid_mid")
    inner = join(path, norm)
    return Location(inner, "inputs"), StreamIn.of(current().module(inner), middle=True)


def after(manifest: Manifest, path: str) -> Place:
    """The stream that the layer leaves behind."""
    _check_layer(manifest, path)
    return Location(path, "output"), StreamOut()


def _check_layer(manifest: Manifest, path: str) -> None:
    parent = manifest.modules.get(path.rpartition(".")[0])
    if parent is None or not parent.is_list:
        raise LocationError(
            f"{expression(path)} is not a layer of the model, and so has no residual stream; a layer's has: "
            "resid_pre, resid_mid and resid_post"
        )
