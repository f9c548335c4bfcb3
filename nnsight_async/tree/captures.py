"""The block that captures residual streams: of the few forms of which a plan can be made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nnsight_async.capture.plain import PLAIN
from nnsight_async.tree.references import envoy_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from nnsight_async.tree.model import ModelView


def capturing(captures: Iterable[tuple[str, str]], model: ModelView) -> Callable[[Any, Any], None]:
    """A block that saves the stream after each of the layers under its name, in every step."""
    order = {path: number for number, path in enumerate(model.tree.__block_owner__.modules)}
    places = sorted(captures, key=lambda place: order.get(place[0], -1))

    def captured(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[:]:
            for path, name in places:
                tracer.save(envoy_at(model.tree, path).resid_post, name)

    line = captured.__code__.co_firstlineno + 3
    saves = tuple(
        ("save", line, SAVER, ("constant", name), ("attribute", ("module", path), "resid_post"), None)
        for path, name in places
    )
    steps = ("steps", line - 2, "_", ("name", "tracer"), ("slice", None, None, None), saves)
    setattr(captured, PLAIN, (steps,))
    return captured


SAVER = ("method", ("name", "tracer"))
