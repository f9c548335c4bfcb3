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

Place = tuple[Location, View, str]
"""Where it passes, how it is read there, and what the user has written."""

MIDDLE_NORMS = ("pre_feedforward_layernorm", "post_attention_layernorm", "ln_2")
"""Norms that take the stream between attention and MLP, by the names that vLLM's layers use (0.32, 0.33). Gemma's
layers have the first two, and there only the first one takes the stream."""


def before(manifest: Manifest, path: str) -> Place:
    """The stream that the layer is called with."""
    place = Location(layer(manifest, path), "inputs")
    return place, StreamIn.of(current().module(path)), f"{expression(path)}.resid_pre"


def middle(manifest: Manifest, path: str) -> Place:
    """The stream between attention and MLP."""
    inner = middle_norm(manifest, path)
    view = StreamIn.of(current().module(inner), middle=True)
    return Location(inner, "inputs"), view, f"{expression(path)}.resid_mid"


def middle_norm(manifest: Manifest, path: str) -> str:
    """The norm that takes the stream between attention and MLP of the layer at `path`; `LocationError` if none does."""
    children = manifest.modules[layer(manifest, path)].children
    norm = next((name for name in MIDDLE_NORMS if name in children), None)
    if norm is None or (norm == "post_attention_layernorm" and "post_feedforward_layernorm" in children):
        kind = manifest.modules[path].cls
        raise LocationError(f"{expression(path)} ({kind}) has no norm between attention and MLP, and so no resid_mid")
    return join(path, norm)


def after(manifest: Manifest, path: str) -> Place:
    """The stream that the layer leaves behind."""
    return Location(layer(manifest, path), "output"), StreamOut(), f"{expression(path)}.resid_post"


def layer(manifest: Manifest, path: str) -> str:
    """`path`, if that is a layer; `LocationError` if not."""
    parent = manifest.modules.get(path.rpartition(".")[0])
    if parent is None or not parent.is_list:
        raise LocationError(
            f"{expression(path)} is not a layer of the model, and so has no residual stream; a layer's has: "
            "resid_pre, resid_mid and resid_post"
        )
    return path
