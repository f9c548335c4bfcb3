"""What a block of few forms does in a step, as data: the same for all requests that run it, but for their tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

if TYPE_CHECKING:
    from nnsight_async.interleave.locations import Location
    from nnsight_async.interleave.views import View

Key = Any
"""What stands between brackets: a number, a name, `None`, `...`, a `Slice`, or a tuple of them."""


@dataclass(frozen=True, slots=True)
class Slice:
    """`start:stop:step`, which equals no tuple of the three. (Slices have no hash before Python 3.12.)"""

    start: int | None
    stop: int | None
    step: int | None


def as_key(key: Key) -> Any:
    """A key as Python has it."""
    if isinstance(key, Slice):
        return slice(key.start, key.stop, key.step)
    if isinstance(key, tuple):
        return tuple(as_key(part) for part in key)  # pyright: ignore[reportUnknownVariableType]
    return key


class Number(NamedTuple):
    """A number as an operand, by its text too: 1 and 1.0 are equal, and do not do the same to a tensor."""

    text: str
    value: int | float


class Read(NamedTuple):
    """Read what passes, or what `view` sees of it. The reading is called by a number."""

    number: int
    view: View | None
    asked: object
    """The location as the block has it."""
    line: int


class Save(NamedTuple):
    """Save a part of a reading under a name, or append it to the list that has been saved under it."""

    reading: Read
    keys: tuple[Key, ...]
    name: str
    appends: bool
    line: int


class Change(NamedTuple):
    """Change a part of a reading in place: `sign` is what stands before the `=`, if anything does.

    The operand is a number, or the tensor of the run that has this index. `assigned`: the whole is assigned then, too.
    """

    reading: Read
    keys: tuple[Key, ...]
    sign: Literal["", "+", "-", "*", "/"]
    operand: Number | int
    assigned: bool
    line: int


Deed = Read | Save | Change


class Stage(NamedTuple):
    """What is done where `event` passes."""

    event: Location
    deeds: tuple[Deed, ...]


class Phase(NamedTuple):
    """What is done in a step, in the order of the model; `lists` are saved empty before."""

    stages: tuple[Stage, ...] = ()
    lists: tuple[str, ...] = ()


class Plan(NamedTuple):
    """What a block does in step 0, and what in those of the `steps` of its loop that come later."""

    first: Phase
    later: Phase
    steps: tuple[int, int | None, int]
    """Start, stop and stride of its loop."""
    filename: str
    function: str
    line: int = 0
    """Of its loop, where the block waits between steps."""

    def phase(self, step: int) -> Phase:
        """What is done in a step."""
        if step == 0:
            return self.first
        start, stop, stride = self.steps
        going = step >= start and (stop is None or step < stop) and (step - start) % stride == 0
        return self.later if going else NOTHING

    def last(self) -> float:
        """The last step in which something is done."""
        start, stop, stride = self.steps
        return math.inf if stop is None else max([0, *range(start, stop, stride)[-1:]])


NOTHING = Phase()
ONCE = (0, 0, 1)
"""The steps of a block without a loop."""


class Planned(NamedTuple):
    """A plan, and the tensors that it has in one run."""

    plan: Plan
    operands: tuple[torch.Tensor, ...]
    last: float
    """The last step in which it does anything."""


@lru_cache(maxsize=1024)
def one_of(plan: Plan) -> Plan:
    """The same object for equal plans, so that runs can be told apart by it."""
    return plan
