"""Expressions of a block of few forms: values that it has brought along, and what it sees of the model's."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nnsight_async.interleave.lent import Lent
from nnsight_async.interleave.locations import LOGITS, SAMPLES, Location
from nnsight_async.interleave.plan import Read, Slice, as_key
from nnsight_async.interleave.views import FirstArgument
from nnsight_async.tree import residual
from nnsight_async.tree.envoy import SETTABLE, Envoy
from nnsight_async.tree.model import ModelView
from nnsight_async.tree.references import envoy_at

if TYPE_CHECKING:
    from nnsight_async.capture.plain import Form
    from nnsight_async.interleave.views import View

LARGEST = 1 << 63
"""Whole numbers beyond it are the block's own affair."""

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv,
}  # fmt: skip
_FIRST_ARGUMENT = FirstArgument()
STREAMS = {"resid_pre": residual.before, "resid_mid": residual.middle, "resid_post": residual.after}


class NoPlan(Exception):  # noqa: N818 -- not raised to anybody
    """The block is to run as it stands."""


class Sight(NamedTuple):
    """A reading, or a part of it, as it was in its step."""

    reading: Read
    keys: tuple[Any, ...]
    epoch: int
    """Which phase it was read in."""
    age: int
    """How many changes were made there before."""


class Forbidden:
    """What a name stands for that may not be used: the number of the step."""


class Expressions:
    """What the names of a block stand for, and what expressions make of it; `NoPlan` for what is not known ahead."""

    _tree: Envoy
    _names: dict[str, Any]

    def _read(self, location: Location, view: View | None, asked: object, line: int) -> Sight:
        """A reading of what passes at a location."""
        raise NotImplementedError

    def _value(self, form: Form, line: int = 0) -> Any:
        match form:
            case ("name", name):
                value = self._names[name]
                if isinstance(value, Forbidden):
                    raise NoPlan
                return value
            case ("constant", value):
                return value
            case ("negative", of):
                return -self._concrete(self._value(of, line))
            case ("attribute", of, name):
                return self._attribute(self._value(of, line), name, line)
            case ("item", of, key):
                return self._item(self._value(of, line), self._key(key))
            case ("binary", sign, left, right):
                operands = [self._concrete(self._value(each, line)) for each in (left, right)]
                return self._computed(sign, *operands)
            case ("module", path):
                return envoy_at(self._tree, path)
            case ("text", parts):
                return "".join(_text(self._value(part, line)) for part in parts)
            case _:
                raise NoPlan

    def _attribute(self, of: Any, name: str, line: int) -> Any:
        if isinstance(of, ModelView):
            if name in ("logits", "samples"):
                place = LOGITS if name == "logits" else SAMPLES
                return self._read(place, None, place, line)
            found = getattr(of, name)
            if type(found) is not Envoy or name in SETTABLE:
                raise NoPlan
            return found
        if type(of) is not Envoy:
            raise NoPlan
        if name not in SETTABLE:
            found = getattr(of, name)
            if type(found) is not Envoy:
                raise NoPlan
            return found
        path = of.__block_reference__()[1]
        if of.__block_owner__.modules[path].reason is not None:
            raise NoPlan
        if name in STREAMS:
            location, view, asked = STREAMS[name](of.__block_owner__, path)
            return self._read(location, view, asked, line)
        location = Location(path, name)  # type: ignore[arg-type]
        return self._read(location, _FIRST_ARGUMENT if name == "input" else None, location, line)

    def _item(self, of: Any, key: Any) -> Any:
        if isinstance(of, Sight):
            return of._replace(keys=(*of.keys, key))
        if type(of) is Envoy and type(key) in (int, str):
            return of[key]
        if isinstance(key, (tuple, Slice)) or key is None or key is Ellipsis:
            return self._tensor(of)[as_key(key)]
        if isinstance(of, torch.Tensor):
            return self._tensor(of)[key]
        if type(of) in (list, tuple, dict):
            return of[key]
        raise NoPlan

    def _key(self, form: Form) -> Any:
        match form:
            case ("slice", *parts):
                return Slice(*(None if part is None else self._integer(self._value(part)) for part in parts))
            case ("keys", parts):
                return tuple(map(self._key, parts))
            case ("rest",):
                return Ellipsis
            case _:
                key = self._value(form)
                if key is not None and type(key) not in (int, str):
                    raise NoPlan
                return key

    def _computed(self, sign: str, left: Any, right: Any) -> Any:
        """What is of the size of an operand at most; anything else the block may compute itself."""
        if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
            shape = torch.broadcast_shapes(left.shape, right.shape)
            if shape not in (left.shape, right.shape):
                raise NoPlan
        with torch.no_grad():
            return self._concrete(OPERATORS[sign](left, right))

    @staticmethod
    def _integer(value: Any) -> int:
        if type(value) is not int:
            raise NoPlan
        return value

    @staticmethod
    def _concrete(value: Any) -> Any:
        """A number or a tensor of the block's own."""
        if type(value) is int and abs(value) > LARGEST:
            raise NoPlan
        return value if type(value) in (int, float) else Expressions._tensor(value)

    @staticmethod
    def _tensor(value: Any) -> torch.Tensor:
        """A tensor that the block has brought along."""
        known = type(value) in (torch.Tensor, torch.nn.Parameter, Lent)
        if not known or value.requires_grad or value.layout is not torch.strided:
            raise NoPlan
        return value.plain() if isinstance(value, Lent) else value


def _text(value: Any) -> str:
    if type(value) not in (int, str):
        raise NoPlan
    return str(value)
