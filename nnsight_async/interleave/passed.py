"""What the stages of a pipeline tell one another about blocks."""

from __future__ import annotations

import pickle
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, NoReturn, Protocol, cast

import torch

from nnsight_async.errors import StageError, UnsupportedError
from nnsight_async.interleave.block import BlockRun, StepStart
from nnsight_async.interleave.locations import Location
from nnsight_async.interleave.rows import Private, Slab, Span, Written

PLAIN = (bool, int, float, complex, str, bytes, slice, torch.dtype, torch.device, torch.Size, type(None))


class Wire(Protocol):
    """The other stages, as one of them reaches them. Messages keep their order, and saying them waits for nobody."""

    def say(self, message: object, stages: Iterable[int]) -> None: ...

    def hear(self, stage: int) -> Any:
        """What a stage says next; `StageError` if it does not."""
        ...

    def heard(self, stage: int) -> bool:
        """Whether that is there already."""
        ...

    def ask(self, stage: int, question: object) -> Any:
        """What the `answer` of a stage returns, whatever its forward pass is at; raises what that raises."""
        ...


class Stages(NamedTuple):
    """Which stage has what, as `stage` sees it."""

    stage: int
    starts: tuple[int, ...]
    """Where the passages of each begin, in the order of the whole model, and where they end."""
    homes: Mapping[str, int]
    cut: AbstractSet[str]
    """The modules around the layers, which are entered on the first stage and left on the last."""
    elsewhere: Mapping[str, torch.nn.Module]
    """By path, what stands here for the modules of other stages."""
    modules: Mapping[str, torch.nn.Module]
    """By path all modules of the model: those of this stage, and those that stand for others."""

    @property
    def last(self) -> int:
        return len(self.starts) - 2

    @property
    def is_last(self) -> bool:
        return self.stage == self.last

    @property
    def others(self) -> list[int]:
        return [stage for stage in range(self.last + 1) if stage != self.stage]

    def of(self, event: Location, index: int | None) -> int:
        """The stage that comes by the passage of that index at `event`; of one that was not recorded, its module's."""
        if not event.in_model:
            return self.last
        if index is None or index < 0:
            return self.homes.get(event.path, self.stage)
        return min(bisect_right(self.starts, index) - 1, self.last)


class Failed(NamedTuple):
    """An exception, where there would have been a value."""

    data: bytes

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        try:
            data = pickle.dumps(error)
            pickle.loads(data)
        except Exception:  # a class of the block's own, or one that is not made of its arguments
            data = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
        return cls(data)

    @property
    def error(self) -> BaseException:
        return pickle.loads(self.data)


class Visited(NamedTuple):
    """A block was at `event`, where it had that many rows, of this value."""

    event: Location
    rows: int
    value: Any


class Called(NamedTuple):
    """A block applied a module, which returned this."""

    path: str
    method: str
    value: Any


class Cached(NamedTuple):
    """A cache, which goes by its number, was given this."""

    number: int
    event: Location
    value: Any


Entry = Visited | Called | Cached


class Told(NamedTuple):
    """A run at the end of a stage: what its block was handed there, and where it stands now."""

    key: int
    part: int
    entries: list[Entry]
    stands: tuple[Any, ...]
    over: bool
    error: Failed | None
    stood: list[tuple[str, int, str]]


class Apply(NamedTuple):
    """Asks for what a module, or a method of one, returns."""

    path: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Fetch(NamedTuple):
    """Asks for a tensor of a module."""

    path: str
    name: str


class Module(NamedTuple):
    """Stands for a module among the arguments of another."""

    path: str


class Far(NamedTuple):
    """Stands for a tensor of a module of another stage."""

    path: str
    name: str


class Opaque:
    """Stands for an object that stays on the stage where it is."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __repr__(self) -> str:
        return f"<a {self._kind} of another pipeline stage>"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") or "_kind" not in vars(self):
            raise AttributeError(name)
        raise UnsupportedError(f"{self!r} cannot be used here: only tensors and plain values go from stage to stage")


class Absent(Slab):
    """The value at a location of another stage that could not be narrowed to a run."""

    def take(self, span: Span) -> Private:
        raise self.value.error

    def checked(self, span: Span, value: Any, private: Private | None, place: object = None) -> Written:
        raise self.value.error


def portable(value: Any) -> Any:
    """A copy that can go to another stage."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (tuple, list)):
        items = [portable(item) for item in cast("list[Any]", value)]
        kind = cast("Any", type(cast("Any", value)))
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    if isinstance(value, Mapping):
        return {key: portable(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    return value if isinstance(value, (*PLAIN, Module, Opaque)) else Opaque(type(value).__qualname__)


def stands(run: BlockRun) -> tuple[Any, ...]:
    """Where a block stands, in words that mean the same on every stage."""
    waits = run.waits if isinstance(run.waits, (Location, StepStart)) else None
    return (run.finished, run.stopped, type(waits).__name__, waits)


def diverged(run: BlockRun) -> StageError:
    return StageError(
        f"in step {max(run.step, 0)} the block did not do the same on all stages of the pipeline: it runs on each of "
        "them, so what it does may depend on the values of the model, on what it was given and on torch's, NumPy's and "
        "Python's random numbers, but not on the time, the process, the order of a set, or what other requests did"
    )
