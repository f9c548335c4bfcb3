"""A whole model as a block and its caller see it: the tree, the logits and the drawn tokens."""

from __future__ import annotations

from typing import Any

from nnsight_async.errors import CaptureError, LocationError, OutsideBlockError, UnsupportedError
from nnsight_async.interleave.context import current, running
from nnsight_async.interleave.locations import LOGITS, SAMPLES
from nnsight_async.interleave.tracer import ELSEWHERE, NOT_HERE
from nnsight_async.tree.envoy import ANOTHER_MODEL, Envoy
from nnsight_async.tree.names import missing, similar

_STARTING = frozenset({"trace", "run", "map", "generate", "edit"})
_NESTED = (
    "is that of one request and runs around its forward passes: start the other run before or after it, or write `with "
    "model.trace() as tracer:` without a prompt, and in its body, side by side, `with tracer.invoke(prompt):` for each"
)
_OF_THE_CALLER = frozenset({
    "aclose", "add_lora", "clear_edits", "close", "dispatch", "dispatched", "edits", "list_loras", "mode",
    "remove_lora", "repo", "stats", "taps", "tokenizer",
})  # fmt: skip
_DECLARING = frozenset({"ablate", "capture", "clamp", "replace", "steer"})
_DECLARED = (
    "model.{0} makes an operation for ops=[...] of a request on vLLM, outside of blocks; in a block, and on a "
    "TransformersModel, read and change layer.resid_post"
)
_ABOVE = "bind what you need of it to a name above the block, such as `{0} = model.{0}`"


class ModelView:
    """The root of a module tree. Modules are attributes, as on the model itself: `model.model.layers[3].mlp`."""

    __block_advice__ = ANOTHER_MODEL
    _not_here = NOT_HERE

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
        if name in _STARTING and running() is not None:
            raise CaptureError(f"model.{name} cannot be used in a block, which {_NESTED}")
        if name in _OF_THE_CALLER and running() is not None:
            raise OutsideBlockError(f"model.{name} is not in the worker, where the block runs: {_ABOVE.format(name)}")
        if hasattr(type(self), name):  # a property raised an AttributeError of its own: let it be seen
            return object.__getattribute__(self, name)
        try:
            found = getattr(self.tree, name)
        except LocationError as error:
            if type(error) is not LocationError:  # a module that is there
                raise
            if name in ELSEWHERE:
                raise UnsupportedError(self._not_here.format(f"model.{name}")) from None
            if name in _DECLARING:
                raise UnsupportedError(_DECLARED.format(name)) from None
            raise LocationError(missing(self.tree.__block_owner__, "", name, self._own())) from None
        if isinstance(found, Envoy):
            self.__dict__[name] = found
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        if running() is not None and name not in ("logits", "samples"):
            near = similar(name, ("logits", "samples"))
            instead = f"did you mean model.{near[0]}?" if near else "model.logits and model.samples can"
            raise LocationError(f"model.{name} cannot be set in a block; {instead}")
        object.__setattr__(self, name, value)

    def _own(self) -> list[str]:
        return [name for name in dir(type(self)) if not name.startswith("_")]

    def __repr__(self) -> str:
        return repr(self.tree)

    def _repr_html_(self) -> str:
        return self.tree._repr_html_()  # pyright: ignore[reportPrivateUsage]  # the name is IPython's

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.tree)})

    def __block_reference__(self) -> tuple[str, ...]:
        return ("model",)

    @property
    def __block_owner__(self) -> object:
        return self
