"""What the code of a block talks to while it runs."""

from __future__ import annotations

import sys
from traceback import StackSummary, walk_stack
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import greenlet

from nnsight_async.errors import OutsideBlockError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from nnsight_async.interleave.console import Console
    from nnsight_async.interleave.locations import Location
    from nnsight_async.interleave.views import View

T = TypeVar("T")


class BlockContext(Protocol):
    """The running block's side of the interleaver."""

    console: Console

    @property
    def differentiable(self) -> bool | None:
        """Whether values of this step are part of a graph that gradients can be taken of; None: they never are."""
        ...

    def read(self, location: Location) -> Any:
        """Wait for `location` in this step and return this run's private copy of the value."""
        ...

    def write(self, location: Location, value: Any) -> None:
        """Replace the value at `location` in this step."""
        ...

    def read_view(self, location: Location, view: View, written: str = "") -> Any:
        """A part of the value at `location`; in-place changes of it land. `written`: what the block's code says."""
        ...

    def write_view(self, location: Location, view: View, part: Any, written: str = "") -> None:
        """Replace a part of the value at `location`."""
        ...

    def save(self, value: Any, name: str | None = None, label: str | None = None) -> Any:
        """Mark `value` to be sent to the caller under `name`; `label` serves when there is no name."""
        ...

    def carry(self, values: Mapping[str, Any], names: Sequence[str]) -> None:
        """The block ends with these values: save those of `names`."""
        ...

    def module(self, path: str) -> torch.nn.Module:
        """The real module at `path`."""
        ...

    def attribute(self, path: str, name: str, default: object) -> Any:
        """An attribute of the real module at `path`, which is to be read and not changed."""
        ...

    def call(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Apply the module at `path` to values of the block, outside the forward pass."""
        ...


class UserGreenlet(greenlet.greenlet):
    """A greenlet that runs code of the user's, which the watchdog may interrupt."""

    def stands(self) -> list[tuple[str, int, str]]:
        """Where it waits: file, line and function, from the outside in."""
        frames = StackSummary.extract(walk_stack(self.gr_frame), lookup_lines=False) if self.gr_frame else []
        return [(frame.filename, frame.lineno or 1, frame.name) for frame in reversed(frames)]


class BlockGreenlet(UserGreenlet):
    """One that runs a block and knows its context."""

    def __init__(self, run: Callable[..., Any], context: BlockContext) -> None:
        super().__init__(run)
        self.context = context


def running() -> BlockContext | None:
    """The context of the block that is running in this greenlet, if any."""
    here = greenlet.getcurrent()
    return here.context if type(here) is BlockGreenlet else None


def current() -> BlockContext:
    """The context of the running block; `OutsideBlockError` where no block runs."""
    here = greenlet.getcurrent()
    if type(here) is BlockGreenlet:
        return here.context
    raise OutsideBlockError(
        "values of the model can only be read, written or saved inside a block: "
        "the body of `with model.trace(...)`, or the function given to `model.run(prompt, probe)`"
    )


def save(value: T, name: str | None = None) -> T:
    """Mark `value` to be sent to the caller and return it.

    Tensors, numbers, strings, None, and lists, tuples and dicts of them can be saved. `name` is needed only where the
    value is not assigned to a variable in the body of the `with`. Raises `SaveError` for other types.
    """
    return current().save(value, name)


def save_expression(value: Any, name: str | None, label: str | None) -> Any:
    """What `EXPR.save()` in a block becomes: ours, unless the value has a `save` of its own."""
    own = getattr(type(value), "save", None)
    if callable(own):
        return value.save()
    return current().save(value, name, label)


def named_save(function: Callable[..., Any], value: Any, names: tuple[str, ...], label: str) -> Any:
    """What `NAME = save(EXPR)` in a block becomes: the names travel if `function` is one of our saves."""
    if function is not save:
        return function(value)
    for name in names or (None,):
        current().save(value, name, label)
    return value


def method_save(receiver: Any, argument: Any, names: tuple[str, ...], label: str) -> Any:
    """What `NAME = EXPR.save(ARGUMENT)` becomes: the save a tracer's or this package's, or a value's, under a name."""
    if getattr(type(receiver), "saves_by_name", False):
        return named_save(save, argument, names, label)
    own = getattr(receiver, "save", None)
    return named_save(own, argument, names, label) if callable(own) else current().save(receiver, argument)


def save_as(value: Any, name: Any) -> Any:
    """What `EXPR.save(name=NAME)` becomes: ours, unless the value has a `save` of its own."""
    own = getattr(value, "save", None)
    return own(name=name) if callable(own) else current().save(value, name)


def carry(names: tuple[str, ...]) -> None:
    """What ends a block in a session: the variables `names` of the calling frame are saved."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    current().carry(frame.f_locals, names)
