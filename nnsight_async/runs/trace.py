"""The `with` form: its body becomes the block of a run."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from nnsight_async.errors import LocationError, OutsideBlockError, UnsupportedError
from nnsight_async.interleave.tracer import ELSEWHERE, NOT_HERE, ONE_PROMPT
from nnsight_async.runs.body import BodyStatement, Ready, caller, check_awaiting_allowed, check_blocking_allowed
from nnsight_async.runs.group import planned
from nnsight_async.runs.handle import Handle, Launcher, asettle, block_of, settle
from nnsight_async.runs.saved import Saved
from nnsight_async.tree.names import similar

if TYPE_CHECKING:
    from nnsight_async.capture.block import Block
    from nnsight_async.capture.body import BodyCapture
    from nnsight_async.interleave.tracer import Iterations
    from nnsight_async.runs.job import Job
    from nnsight_async.runs.request import Request


class Tracer(Handle):
    """What `with model.trace(...) as tracer` gives: inside the body it drives the block, after it, it is the run."""

    __block_advice__ = (
        "write `with ... as tracer:` and use that tracer; take a value of another trace from its tracer above the block"
    )

    def __init__(self, asynchronous: bool) -> None:
        super().__init__()
        self._asynchronous = asynchronous

    @property
    def saves(self) -> Any:
        """Saved values by name. Async: `Saved` objects, `await saves` for all; sync: a dict of the values."""
        found = super().saves
        return found if self._asynchronous else found.result()

    @property
    def result(self) -> Any:
        """vLLM's `RequestOutput` with the final values as `.saves`; in async mode, `await tracer.result`."""
        found = super().result
        return found if self._asynchronous else found()

    @property
    def iter(self) -> Iterations:
        """Steps to follow; only inside the block."""
        raise _outside("tracer.iter")

    def all(self) -> Iterator[int]:
        """All steps; only inside the block."""
        raise _outside("tracer.all()")

    def stop(self) -> NoReturn:
        """End the request at this step; only inside the block (outside: `cancel`)."""
        raise _outside("tracer.stop()")

    def invoke(self, *prompt: Any, **sampling: Any) -> Any:
        """One of several prompts; only in a trace that was given no prompt."""
        raise ValueError(ONE_PROMPT)

    def __getattr__(self, name: str) -> NoReturn:
        if hasattr(type(self), name):  # a property raised an AttributeError, which may be the block's: let it be seen
            object.__getattribute__(self, name)
        if name in ELSEWHERE:
            raise UnsupportedError(NOT_HERE.format(f"tracer.{name}"))
        own = [other for other in dir(type(self)) if not other.startswith("_")]
        near = similar(name, own)
        instead = f"did you mean tracer.{near[0]}?" if near else f"it has {', '.join(own)}"
        raise LocationError(f"a tracer has no {name!r}; {instead}")

    def __block_reference__(self) -> tuple[str, ...]:
        return ("tracer",)

    @property
    def __block_owner__(self) -> object:
        return self


def _outside(what: str) -> OutsideBlockError:
    return OutsideBlockError(f"{what} belongs inside the `with model.trace(...)` block")


class Trace(BodyStatement):
    """The context manager that `model.trace(prompt)` returns.

    `with` waits for the run and gives values; on a model of mode "async" it serves threads that have no event loop.
    `async with` gives `Saved` objects.
    """

    def __init__(self, launcher: Launcher, request: Request, asynchronous: bool, *, carries: bool = False) -> None:
        """`carries`: it is part of a session, which waits for each run and passes on what its block has bound."""
        self._launcher = launcher
        self._request = request
        self._asynchronous = asynchronous
        self._carries = carries
        self._tracer = Tracer(asynchronous)

    def __enter__(self) -> Tracer:
        check_blocking_allowed(self._asynchronous)
        self._tracer = Tracer(asynchronous=False)
        return self._enter(caller())

    def __aenter__(self) -> Ready[Tracer]:
        check_awaiting_allowed(self._asynchronous)
        return Ready(self._enter(caller()))

    def _finish(self, capture: BodyCapture) -> None:
        block = block_of(self._launcher, capture, self._tracer)
        run = planned(self._request, block)
        self._launcher.launch(run)
        self._tracer.attach(run)
        self._bind(settle(run), block, capture)

    async def _afinish(self, capture: BodyCapture) -> None:
        block = block_of(self._launcher, capture, self._tracer)
        run = planned(self._request, block)
        await self._launcher.alaunch(run)
        self._tracer.attach(run)
        if self._carries:
            self._bind(await asettle(run), block, capture)
        else:
            capture.bind({name: Saved(run, name) for name in block.names})

    def _bind(self, run: Job, block: Block, capture: BodyCapture) -> None:
        run.check()
        values = run.values
        capture.bind({name: values[name] for name in block.names if name in values})

    def _enter(self, frame: FrameType) -> Tracer:
        return self._skip(frame, self._tracer)
