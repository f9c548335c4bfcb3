"""A trace without a prompt of its own: each invoke in its body is one, and all are submitted together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from nnsight_async.errors import OutsideBlockError
from nnsight_async.runs.body import BodyStatement, Ready, caller, check_awaiting_allowed, check_blocking_allowed
from nnsight_async.runs.group import Invokes, planned
from nnsight_async.runs.handle import Launcher, asettle, block_of, settle
from nnsight_async.runs.saved import Saved
from nnsight_async.runs.trace import Tracer

if TYPE_CHECKING:
    from nnsight_async.capture.block import Block
    from nnsight_async.capture.body import BodyCapture
    from nnsight_async.runs.request import Request

ABSENT: Any = object()
"""A prompt that was not given; None is one that was, by mistake."""

WRITE = (
    "write `with model.trace(prompt) as tracer:`, or `with tracer.invoke(prompt):` once for each prompt in the body of "
    "`with model.trace() as tracer:`"
)

Asking = Callable[[Any, Mapping[str, Any]], "Request"]


class InvokeTracer(Tracer):
    """What `with model.trace() as tracer` gives: its body runs as it stands, and each invoke in it is one request."""

    def __init__(self, launcher: Launcher, asynchronous: bool, asking: Asking, *, carries: bool = False) -> None:
        super().__init__(asynchronous)
        self.launcher = launcher
        self.carries = carries
        self._asking = asking
        self._open = True
        self.captured: list[Invoke] = []

    def invoke(self, prompt: Any = ABSENT, **sampling: Any) -> Invoke:
        """`with tracer.invoke(prompt, ...)`: one request, whose block is the body of this `with`.

        Settings given here win over those of the trace. The tracer that it gives is of this request alone: its
        `result`, `saves`, `stream()` and `cancel()`. Raises `ValueError` without a prompt, or for an empty one.
        """
        if prompt is ABSENT:
            raise ValueError(f"tracer.invoke() needs a prompt, since its body is the block of a request: {WRITE}")
        if not self._open:
            raise OutsideBlockError(
                "tracer.invoke() belongs inside the `with model.trace() as tracer:`, which has ended"
            )
        return Invoke(self._asking(prompt, sampling), self._asynchronous, self)

    def close(self, error: BaseException | None) -> list[Invoke]:
        """The body has ended; the invokes to submit, which are none after an `error` of the body."""
        self._open = False
        if error is None and not self.captured:
            raise ValueError(f"a trace without a prompt and without an invoke has nothing to run: {WRITE}")
        if isinstance(error, OutsideBlockError):
            error.add_note(f"this trace has no prompt, so its body is ordinary code and no block: {WRITE}")
        return self.captured if error is None else []


class Invoke(BodyStatement):
    """The context manager that `tracer.invoke` returns; it only takes the block, `with` and `async with` alike."""

    def __init__(self, request: Request, asynchronous: bool, outer: InvokeTracer) -> None:
        self.request = request
        self.tracer = Tracer(asynchronous)
        self.block: Block
        self._outer = outer
        self._carries = outer.carries
        self._taken: BodyCapture

    def __enter__(self) -> Tracer:
        return self._skip(caller(), self.tracer)

    def __aenter__(self) -> Ready[Tracer]:
        return Ready(self._skip(caller(), self.tracer))

    def _finish(self, capture: BodyCapture) -> None:
        self.block = block_of(self._outer.launcher, capture, self.tracer, self._outer)
        self._taken = capture
        self.request.invoke = len(self._outer.captured)
        self._outer.captured.append(self)

    async def _afinish(self, capture: BodyCapture) -> None:
        self._finish(capture)

    def bind(self, values: Mapping[str, object]) -> None:
        """Assign those of `values` that this invoke names to the variables around it."""
        self._taken.bind({name: values[name] for name in self.block.names if name in values})


class InvokeTrace:
    """The context manager that `model.trace()` returns; `with` and `async with` as for `Trace`."""

    def __init__(self, launcher: Launcher, asking: Asking, asynchronous: bool, *, carries: bool = False) -> None:
        self._launcher = launcher
        self._asking = asking
        self._asynchronous = asynchronous
        self._carries = carries
        self._tracer = self._made(asynchronous)

    def _made(self, asynchronous: bool) -> InvokeTracer:
        return InvokeTracer(self._launcher, asynchronous, self._asking, carries=self._carries)

    def __enter__(self) -> InvokeTracer:
        check_blocking_allowed(self._asynchronous)
        self._tracer = self._made(asynchronous=False)
        return self._tracer

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        invokes = self._tracer.close(exc)
        if not invokes:
            return
        group = _group(invokes)
        self._launcher.launch(group)
        self._attach(group, invokes)
        self._bind(settle(group).values, invokes)
        group.check()

    async def __aenter__(self) -> InvokeTracer:
        check_awaiting_allowed(self._asynchronous)
        self._tracer = self._made(asynchronous=True)
        return self._tracer

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        invokes = self._tracer.close(exc)
        if not invokes:
            return
        group = _group(invokes)
        await self._launcher.alaunch(group)
        self._attach(group, invokes)
        if self._carries:
            self._bind((await asettle(group)).values, invokes)
            group.check()
        else:
            self._bind({name: Saved(group, name) for name in group.names}, invokes)

    def _bind(self, values: Mapping[str, object], invokes: list[Invoke]) -> None:
        for invoke in invokes:
            invoke.bind(values)
        invokes.clear()  # they know the frame around them, which knows the tracer, which knows them

    def _attach(self, group: Invokes, invokes: list[Invoke]) -> None:
        self._tracer.attach(group)
        for invoke, part in zip(invokes, group.parts, strict=True):
            invoke.tracer.attach(part)


def _group(invokes: list[Invoke]) -> Invokes:
    return Invokes([planned(invoke.request, invoke.block) for invoke in invokes])
