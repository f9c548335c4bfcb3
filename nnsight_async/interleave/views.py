"""Values derived from what passes at a location, and how an edited one is put back."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from nnsight_async.errors import ShapeError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class View(Protocol):
    """Reads something out of a passing value, and makes the passing value that has another in its place."""

    def get(self, value: Any) -> Any: ...
    def put(self, value: Any, part: Any) -> Any: ...
    def shared(self, value: Any) -> bool:
        """Whether a change has to reach others who hold the same tensor."""
        ...


@dataclass(frozen=True, slots=True)
class FirstArgument:
    """The first positional argument of a call; the first keyword argument where there is no positional one."""

    def get(self, value: Arguments) -> Any:
        args, kwargs = value
        return args[0] if args else next(iter(kwargs.values()), None)

    def put(self, value: Arguments, part: Any) -> Arguments:
        args, kwargs = value
        if args:
            return (part, *args[1:]), kwargs
        return args, {**kwargs, next(iter(kwargs)): part}

    def shared(self, value: Any) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class StreamOut:
    """The residual stream after a layer: its output, or the sum of (hidden, residual) where it returns both.

    vLLM adds the two only in the next layer's norm (0.32, 0.33). A stream that is put back goes into the residual,
    beside a hidden state of zeros, so that the sum is exact in any dtype.
    """

    def get(self, value: Any) -> torch.Tensor:
        return _sum(*pair(value))

    def put(self, value: Any, part: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return part
        hidden, residual, *rest = value
        return (*_split(hidden, residual, part), *rest)

    def shared(self, value: Any) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class StreamIn:
    """The residual stream that a module is called with: `hidden`, plus `residual` where it is given too.

    In the middle of a layer that keeps the stream in a variable of its own (GPT-2), the norm's input is that very
    tensor: there a change has to be made in place to reach the stream.
    """

    names: tuple[str, ...]
    hidden: str
    residual: str | None
    middle: bool

    @classmethod
    def of(cls, module: torch.nn.Module, *, middle: bool = False) -> StreamIn:
        """For the arguments that the module's `forward` names; a norm that takes (x, residual) counts as well."""
        names = tuple(inspect.signature(_forward_of(module)).parameters)
        hidden = next((name for name in ("hidden_states", "x", "input", "hidden") if name in names), None)
        if hidden is None:
            raise ShapeError(f"{type(module).__name__} is not called with a hidden state, but with {', '.join(names)}")
        residual = "residual" if "residual" in names else None
        return cls(names, hidden, residual, middle)

    def get(self, value: Arguments) -> torch.Tensor:
        given = self._named(value)
        return _sum(given[self.hidden], given.get(self.residual) if self.residual else None)

    def put(self, value: Arguments, part: Any) -> Arguments:
        given = self._named(value)
        residual = given.get(self.residual) if self.residual else None
        hidden, residual = _split(given[self.hidden], residual, part)
        changed = {self.hidden: hidden} | ({self.residual: residual} if residual is not None and self.residual else {})
        args, kwargs = value
        args = tuple(changed.get(name, item) for name, item in zip(self.names, args, strict=False))
        return args, {name: changed.get(name, item) for name, item in kwargs.items()}

    def shared(self, value: Arguments) -> bool:
        return self.middle and (self.residual is None or self._named(value).get(self.residual) is None)

    def _named(self, value: Arguments) -> Mapping[str, Any]:
        args, kwargs = value
        return {**dict(zip(self.names, args, strict=False)), **kwargs}


def _forward_of(module: torch.nn.Module) -> Any:
    """The function whose parameters the module's callers fill; `CustomOp.forward` of vLLM takes anything."""
    native = getattr(type(module), "forward_native", None)
    return native.__get__(module) if native is not None else type(module).forward.__get__(module)


def pair(value: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    if isinstance(value, torch.Tensor):
        return value, None
    if isinstance(value, (tuple, list)):
        items = cast("list[Any]", value)
        if len(items) >= 2 and all(isinstance(item, torch.Tensor) for item in items[:2]):
            return items[0], items[1]
        if items and isinstance(items[0], torch.Tensor):
            return items[0], None
    raise ShapeError("this module does not return a hidden state")


def _sum(hidden: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    return hidden if residual is None else hidden + residual


def _split(hidden: torch.Tensor, residual: torch.Tensor | None, stream: torch.Tensor) -> tuple[Any, Any]:
    if residual is None:
        return stream, None
    return torch.zeros_like(hidden), stream
