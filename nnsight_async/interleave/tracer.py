"""What a block sees as its `tracer`: steps, stopping, saving."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from itertools import count
from operator import index
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, TypeVar

from nnsight_async.errors import LocationError, OutsideBlockError, UnsupportedError

if TYPE_CHECKING:
    from nnsight_async.interleave.block import BlockRun
    from nnsight_async.interleave.cache import Cache

T = TypeVar("T")

ONE_PROMPT = (
    "this block is that of one prompt and cannot invoke another: write `with model.trace() as tracer:` without a "
    "prompt, and in its body, side by side, `with tracer.invoke(prompt):` for each prompt"
)
FROM_ZERO = (
    "steps are counted from 0, not from the end, which is not known before it has come (max_tokens only limits it). "
    "For the last step, save in every step of `tracer.iter[:]`: the final value of a name is what was saved last. For "
    "the last few, append to a saved list and take its end"
)
ELSEWHERE = frozenset({"backward", "barrier", "scan", "session"})
"""What vLLM has no counterpart of."""

NOT_HERE = "{0} is not available on vLLM; TransformersModel has it"
_NAMES = ("iter", "all", "stop", "save", "cache", "step", "invoke")


class Tracer:
    """The tracer inside a block."""

    saves_by_name = True
    _not_here = NOT_HERE

    def __init__(self, run: BlockRun) -> None:
        self._run = run

    @property
    def iter(self) -> Iterations:
        """Steps to follow: `tracer.iter[:]`, `[a:b]`, `[n]` or a list of step numbers.

        `ValueError` for steps counted from the end, and for a stride that is not positive.
        """
        return Iterations(self._run)

    def all(self) -> Iterator[int]:
        """All steps from this one on, like `tracer.iter[:]`."""
        return Steps(self._run, count())

    def stop(self) -> NoReturn:
        """End the request at this step; what was saved up to here comes back."""
        self._run.stop()

    def invoke(self, *prompt: Any, **sampling: Any) -> NoReturn:
        """Not available in the block of a prompt."""
        raise ValueError(ONE_PROMPT)

    def save(self, value: T, name: str | None = None) -> T:
        """Mark `value` to be sent home under `name`, and return it."""
        self._run.save(value, name)
        return value

    def cache(self, modules: Iterable[Any] | None = None, *, include_inputs: bool = False) -> Cache:
        """Collect the outputs (and inputs) of modules in this step and all that follow; save it to have it sent home.

        `modules` are modules of the tree or their paths; None means all that the forward pass calls. The cache is a
        dict of lists by location, such as `"model.layers.0.output"`, and holds this run's rows only. Raises
        `UnreadableError` for a module that is never called, or is read elsewhere.
        """
        chosen = None if modules is None else list(modules)
        for module in chosen or ():
            check = getattr(type(module), "__block_check__", None)
            if check is not None:
                check(module)
        return self._run.collect(chosen, include_inputs)

    @property
    def step(self) -> int:
        """Number of the step that the block is in; 0 is the prefill."""
        return self._run.step

    def __getattr__(self, name: str) -> NoReturn:
        if name in ELSEWHERE:
            raise UnsupportedError(self._not_here.format(f"tracer.{name}"))
        if name in ("saves", "result", "stream", "cancel"):
            raise OutsideBlockError(f"tracer.{name} is that of the whole run: use it after the block")
        near = get_close_matches(name, _NAMES, 1, 0.7)
        instead = f"did you mean tracer.{near[0]}?" if near else f"it has {', '.join(_NAMES)}"
        raise LocationError(f"a tracer inside a block has no {name!r}; {instead}")


class Iterations:
    """The subscript behind `tracer.iter`."""

    def __init__(self, run: BlockRun) -> None:
        self._run = run

    def __getitem__(self, steps: slice | SupportsIndex | Iterable[SupportsIndex]) -> Steps:
        return Steps(self._run, _numbers(steps))

    def __iter__(self) -> Steps:
        return Steps(self._run, count())


class Steps:
    """Iterates over the steps asked for as the generation reaches them; ends when the generation does."""

    def __init__(self, run: BlockRun, numbers: Iterable[int]) -> None:
        self._run = run
        self._numbers = iter(numbers)

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> int:
        wanted = next(self._numbers)
        while wanted < self._run.next_step:
            wanted = next(self._numbers)
        if not self._run.reach(wanted):
            raise StopIteration
        return wanted


def _numbers(steps: slice | SupportsIndex | Iterable[SupportsIndex]) -> Iterable[int]:
    if isinstance(steps, slice):
        parts = (steps.start, steps.stop, steps.step)
        start, stop, stride = (None if part is None else index(part) for part in parts)
        start, stride = start or 0, 1 if stride is None else stride
        if stride < 1:
            raise ValueError(f"tracer.iter[{_written(steps)}]: steps come one after the other; the stride is 1 or more")
        _check(_written(steps), start, stop or 0)
        return count(start, stride) if stop is None else range(start, stop, stride)
    several = sorted(map(index, steps)) if isinstance(steps, Iterable) else [index(steps)]
    _check(steps, *several)
    return several


def _check(written: object, *numbers: int) -> None:
    if any(number < 0 for number in numbers):
        raise ValueError(f"tracer.iter[{written}]: {FROM_ZERO}")


def _written(steps: slice) -> str:
    parts = [steps.start, steps.stop] if steps.step is None else [steps.start, steps.stop, steps.step]
    return ":".join("" if part is None else str(part) for part in parts)
