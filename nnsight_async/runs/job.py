"""What comes of a run, or of several that belong together, and who waits for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nnsight_async.errors import NotSavedError
from nnsight_async.runs.history import Step
from nnsight_async.runs.signal import Signal

if TYPE_CHECKING:
    from nnsight_async.runs.group import Group
    from nnsight_async.runs.run import Run
    from nnsight_async.runs.token import Token


class Job(ABC):
    """Tokens and saved values in the order in which they come.

    The engine's loop fills it; callers wait on `changed`, or on `ended`, from wherever they are.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.steps: list[Step] = []
        self.changed = Signal()
        self.ended = Signal()
        self.settled = False
        self._whole: Group | None = None
        self._readers: set[object] = set()
        self._streams: set[object] = set()

    @property
    def tokens(self) -> list[Token]:
        """Those that are out."""
        return [step.token for step in self.steps if step.token is not None]

    # -- what it comes to ------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def values(self) -> dict[str, Any]:
        """The value of each name as it stands now."""

    @abstractmethod
    def final(self, name: str | None = None) -> bool:
        """Whether the value of `name`, or of every name, does not change any more."""

    @abstractmethod
    def failed(self, name: str | None = None) -> Run | None:
        """The first run that failed, of those that `name`, or anything, comes from."""

    @abstractmethod
    def outcome(self) -> Any:
        """vLLM's `RequestOutput` (of several prompts: a list), with the values as `.saves`; raises what failed."""

    @abstractmethod
    def cancel(self) -> None:
        """Abort, from any thread; what waits gets `RunCancelledError`."""

    @abstractmethod
    def hear(self) -> None:
        """The caller is told of what failed, so that it need not be logged."""

    @abstractmethod
    def runs(self) -> Iterator[Run]:
        """The single requests that this consists of."""

    def check(self, name: str | None = None) -> None:
        """Raise the error of a run that failed, with the traceback that it came with, however often it is raised."""
        run = self.failed(name)
        if run is not None and run.error is not None:
            run.hear()
            run.error.__context__ = None  # that of an earlier time
            try:
                raise run.error.with_traceback(run.traceback)
            finally:  # what the block was handling comes before what the caller is handling
                run.error.__context__ = run.context or run.error.__context__

    @abstractmethod
    def warn(self) -> None:
        """Issue what the blocks warned of and nobody has been told yet; called where the caller waits."""

    def value(self, name: str) -> Any:
        """The final value of a name, once it is there; raises what failed, or `NotSavedError`."""
        self.warn()
        self.check(name)
        values = self.values
        if name not in values:
            raise NotSavedError(f"the block ended without saving {name!r}; it saved {', '.join(values) or 'nothing'}")
        return values[name]

    def source(self, name: str) -> Job:
        """The smallest part that `name` can come from."""
        return self

    # -- who reads it ----------------------------------------------------------------------------------------------

    @contextmanager
    def read(self, *, steps: bool = False) -> Generator[None]:
        """Wait for something of this; one who is cancelled or interrupted in it aborts what nobody else reads."""
        reader = object()
        self.open(reader, steps=steps)
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self.leave(reader)
            raise
        finally:
            self.shut(reader)

    def open(self, reader: object, *, steps: bool) -> None:
        """Count `reader` among those who read this, or even every one of its steps."""
        self._readers.add(reader)
        if steps:
            self._streams.add(reader)

    def shut(self, reader: object) -> None:
        """`reader` has all it wanted."""
        self._readers.discard(reader)
        self._streams.discard(reader)

    def leave(self, reader: object) -> None:
        """`reader` goes before the end: abort what nobody else reads."""
        self.shut(reader)
        for run in self.runs():
            if not run.is_read():
                run.cancel()

    def is_read(self) -> bool:
        """Whether somebody reads this, or what it is a part of."""
        return bool(self._readers) or (self._whole is not None and self._whole.is_read())

    def is_streamed(self) -> bool:
        """Whether somebody reads every step of this, or of what it is a part of."""
        return bool(self._streams) or (self._whole is not None and self._whole.is_streamed())

    def step(self, number: int) -> Step | None:
        """What came of a step, which whoever asks has read then; None if there was none."""
        if number >= len(self.steps):
            return None
        step = self.steps[number]
        step.read = True
        return step

    # -- being filled ----------------------------------------------------------------------------------------------

    def join(self, whole: Group) -> None:
        """Pass everything on to `whole`, which this is a part of."""
        self._whole = whole

    def take(self, step: Step) -> None:
        """A token is out, with the values of its step, or what was saved after the last one."""
        self.steps.append(step)
        if self._whole is not None:
            self._whole.take(step)

    def tell(self) -> None:
        """Have everyone who waits look again."""
        self.changed.notify()
        if self._whole is not None:
            self._whole.tell()

    def end(self) -> None:
        """Nothing comes any more."""
        self.settled = True
        self.tell()
        self.ended.notify()
        whole, self._whole = self._whole, None  # no cycle is left to the garbage collector
        if whole is not None:
            whole.part_ended()
