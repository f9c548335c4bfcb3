"""The methods of a model that declare operations."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from nnsight_async.runs.ops import Capture, Op, Vector, number_of, positions_of, unit, vector_of
from nnsight_async.tree import residual
from nnsight_async.tree.envoy import Envoy
from nnsight_async.tree.layers import numbered, stream_width

if TYPE_CHECKING:
    import torch

    from nnsight_async.tree.manifest import Manifest


class Declaring:
    """Makes operations for `ops=[...]`, each on the residual stream that a layer leaves behind (`resid_post`).

    `layer` is a layer of the model, or its number. `positions` chooses tokens of the sequence: None for all, "prompt",
    "generated", a position (0 is the first of the prompt, -1 its last), a list of positions, or a slice of them.
    Vectors are of the stream's width, tensors on any device or NumPy arrays, and finite; the arithmetic is in float32.

    Raises `LocationError` for what is no layer, `ShapeError` for a vector of another width, and `TypeError` or
    `ValueError` for what is no vector, number or position.
    """

    if TYPE_CHECKING:

        @property
        def tree(self) -> Envoy: ...

    def steer(self, layer: Any, vector: Any, *, scale: float = 1.0, positions: Any = None) -> Op:
        """Add `scale * vector` to the stream."""
        path, found = self._declared(layer, vector, "steer()")
        amount = number_of(scale, "steer()", "scale")
        return Op("steer", path, Vector.of(found), amount, 0.0, positions_of(positions, "steer()"))

    def ablate(self, layer: Any, direction: Any, *, scale: float = 1.0, positions: Any = None) -> Op:
        """Take the part along `direction` out of the stream, or `scale` of it."""
        path, found = self._declared(layer, direction, "ablate()")
        amount = number_of(scale, "ablate()", "scale")
        vector = Vector.of(unit(found, "ablate()"))
        return Op("ablate", path, vector, amount, 0.0, positions_of(positions, "ablate()"))

    def clamp(
        self,
        layer: Any,
        direction: Any,
        *,
        min: float | None = None,  # noqa: A002  as in torch.clamp
        max: float | None = None,  # noqa: A002
        positions: Any = None,
    ) -> Op:
        """Keep the stream's coordinate along `direction` between `min` and `max`."""
        path, found = self._declared(layer, direction, "clamp()")
        if min is None and max is None:
            raise ValueError("clamp() needs min= or max=, or both")
        low = -math.inf if min is None else number_of(min, "clamp()", "min")
        high = math.inf if max is None else number_of(max, "clamp()", "max")
        if low > high:
            raise ValueError(f"clamp() got min={min} above max={max}")
        return Op("clamp", path, Vector.of(unit(found, "clamp()")), low, high, positions_of(positions, "clamp()"))

    def replace(self, layer: Any, value: Any, *, positions: Any = None) -> Op:
        """Put `value` in the place of the stream."""
        path, found = self._declared(layer, value, "replace()")
        return Op("replace", path, Vector.of(found), 0.0, 0.0, positions_of(positions, "replace()"))

    def capture(self, layer: Any, name: str) -> Capture:
        """Save the stream under `name` in every step, as it is after the other operations and the edits."""
        if type(name) is not str or not name or not name.isprintable():
            raise TypeError(f"capture() got name={name!r}: a name to save under is expected")
        return Capture(self._layer(layer, "capture()")[0], name)

    def _declared(self, layer: Any, vector: Any, what: str) -> tuple[str, torch.Tensor]:
        path, manifest = self._layer(layer, what)
        return path, vector_of(vector, f"{what} at {path}", stream_width(manifest, path))

    def _layer(self, layer: Any, what: str) -> tuple[str, Manifest]:
        if isinstance(layer, Envoy):
            manifest: Manifest = layer.__block_owner__
            path = residual.layer(manifest, layer.__block_reference__()[1])
            return manifest.modules[path].alias_of or path, manifest
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise TypeError(f"{what} takes a layer of the model or its number, not {layer!r}")
        manifest = self.tree.__block_owner__
        return numbered(manifest, layer), manifest
