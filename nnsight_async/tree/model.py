"""A whole model as a block and its caller see it: the tree, the logits and the drawn tokens."""

from __future__ import annotations

from typing import Any

from nnsight_async.interleave.context import current
from nnsight_async.interleave.locations import LOGITS, SAMPLES
from nnsight_async.tree.envoy import Envoy


class ModelView:
    """The root of a module tree. Modules are attributes, as on the model itself: `model.model.layers[3].mlp`."""

    def __init__(self, root: Envoy) -> None:
        self.__dict__["_root"] = root

    @property
    def logits(self) -> Any:
        """`[1, vocab]`, before sampling; assign to replace it, or change it in place."""
        return current().read(LOGITS)

    @logits.setter
    def logits(self, value: Any) -> None:
        current().write(LOGITS, value)

    @property
    def samples(self) -> Any:
        """`[1, 1]`, the token id that was drawn; assign to have the generation go on from another."""
        return current().read(SAMPLES)

    @samples.setter
    def samples(self, value: Any) -> None:
        current().write(SAMPLES, value)

    @property
    def tree(self) -> Envoy:
        """The root module."""
        return self.__dict__["_root"]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if hasattr(type(self), name):  # a property raised an AttributeError of its own: let it be seen
            return object.__getattribute__(self, name)
        found = getattr(self.tree, name)
        if isinstance(found, Envoy):
            self.__dict__[name] = found
        return found

    def __repr__(self) -> str:
        return repr(self.tree)

    def _repr_html_(self) -> str:
        return self.tree._repr_html_()  # pyright: ignore[reportPrivateUsage]  # the name is IPython's

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.tree)})

    def __block_reference__(self) -> tuple[str, ...]:
        return ("model",)
