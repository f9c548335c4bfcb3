"""One run's block: a greenlet that parks on locations and steps, and is woken there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import greenlet
import torch

from nnsight_async.errors import (
    GenerationEndedError,
    NNsightError,
    OutOfOrderError,
    SaveError,
)
from nnsight_async.interleave.cache import Cache
from nnsight_async.interleave.console import REPLACED, Console, warn
from nnsight_async.interleave.context import BlockGreenlet, UserGreenlet
from nnsight_async.interleave.foresight import foresee
from nnsight_async.interleave.locations import Location
from nnsight_async.interleave.modes import MODES_CHANGED, Modes
from nnsight_async.interleave.saving import Saves
from nnsight_async.interleave.tracer import Tracer
from nnsight_async.interleave.views import FirstArgument, View
from nnsight_async.interleave.watchdog import ABANDONED, Expired, said, timeout_error

if TYPE_CHECKING:
    from nnsight_async.interleave.crews import Crew
    from nnsight_async.interleave.interleaver import Interleaver
    from nnsight_async.interleave.plan import Planned
    from nnsight_async.interleave.visit import Visit

PATIENCE = 100
"""How often a block that catches the errors thrown into it may wait for what cannot come, before it is unwound."""

UNWINDING = 1.0
"""Seconds that `finally` and `except` clauses have in a block that is ended."""

Program = Callable[[Any, Tracer], object]
_FIRST_ARGUMENT = FirstArgument()
_grad_enabled = torch.is_grad_enabled


class _Stop(BaseException):
    """Unwinds a block that called `tracer.stop()`."""


class StepStart(NamedTuple):
    """Waiting for a step to begin."""

    number: int


class BlockRun:
    """A block and where it stands. It is the `BlockContext` of the code that runs in its greenlet."""

    def __init__(
        self,
        key: int,
        interleaver: Interleaver,
        prompt_rows: int,
        budget: int = 1 << 30,
        timeout: float = 60.0,
        *,
        part: int = 0,
    ) -> None:
        self.key = key
        self.part = part
        """Which of the blocks of its request this is; in one place, they have their turns in this order."""
        self.alone = True
        """Whether its request has no other block."""
        self.rowwise = False
        """Whether rows whose keys and values are cached already may be kept from it."""
        self.planned: Planned | None = None
        """What is done in the place of the block, where that is known (`interleave/planned.py`)."""
        self.crew: Crew | None = None
        """With whom it does its steps, where it does the same in each; what it is asked meanwhile is of before."""
        self.console = Console()
        self.program: Program | None = None
        self.tracer = interleaver.setting.tracer(self)
        self.prompt_rows = prompt_rows
        self.position = 0
        self.step = -1
        self.next_step = 0
        self.saves = Saves(budget)
        self.error: BaseException | None = None
        self.stood: list[tuple[str, int, str]] = []
        """Where the block waited (file, line and function, from the outside in) when an error ended it from outside."""
        self.stopped = False
        self.wrote = False
        self.finished = False
        self.reports = 0
        """How often the worker has said where it stands."""
        self.caches: list[Cache] = []
        self.ended = False
        self._killed = False
        self.waits: Any = StepStart(0)
        """A location, the start of a step, or something else that somebody will resume it for; None: nothing."""
        self.asked: object = None
        """The location that it waits for, or has waited for last, as its code says it."""
        self.visit: Visit | None = None
        self.clock = -1
        self.coming: int | None = None
        """When the location comes that it waits for, by the clock; it is known to come after now."""
        self.place: Location | None = None
        """The operation that this run has visited last in this step."""
        self.looks_inside = False
        """Whether the block uses `.source`, or what it took of one above."""
        self.takes_gradients = False
        """Whether the block takes gradients, as far as its text tells."""
        self.gives_out = False
        """Whether the block may change tensors by their memory, where changes are not counted."""
        self.watched = True
        """Whether it is looked for modes of torch that the block has left switched at the end of each turn."""
        self._looked_ahead = False
        self._grad_mode: bool | None = None
        """The block's own, while it waits."""
        self._timeout = timeout
        self._interleaver = interleaver
        self._greenlet: UserGreenlet = BlockGreenlet(self._main, self)
        self._hub = greenlet.getcurrent()

    @property
    def over(self) -> bool:
        """Whether the run has no more to do in any step."""
        return self.finished and (not self.caches or self.ended or self.stopped or self.error is not None)

    # -- driven by the interleaver ---------------------------------------------------------------------------------

    def prepare(self, load: Callable[[], Program]) -> None:
        """Have the program made, by code of the user among others: in the time of a turn, and an error ends it."""

        def made(_: Any) -> None:
            try:
                self.program = load()
            except BaseException as error:
                self.error = error

        self._interleaver.modes = Modes.now()
        block, waits = self._greenlet, self.waits
        if self._interleaver.watchdog.takes_turns:
            self._greenlet = UserGreenlet(made)
            self._enter(self._greenlet.switch, None)
            self._greenlet = block
        else:
            self._enter(made, None)
        self._grad_mode = None
        if self.error is None:
            self.waits = waits
        else:
            self.fail(said(self.error, self._timeout))

    def look_ahead(self) -> None:
        """Find out what the block will do, before it begins."""
        if not self._looked_ahead:
            self._looked_ahead = True
            foresight = foresee(self.program)
            self.looks_inside = self.looks_inside or foresight.source
            self.takes_gradients = foresight.gradients
            self.saves.at_once = foresight.changes or foresight.memory
            self.gives_out = foresight.memory
            self.watched = foresight.modes or self._interleaver.setting.own_process

    def begin(self) -> None:
        """A forward pass with new rows of this run begins."""
        self.step += 1
        self.clock = -1
        self.place = self.visit = None
        if self.planned is not None:
            return
        if isinstance(self.waits, StepStart) and self.waits.number <= self.step:
            self.resume()

    def resume(self, value: Any = True) -> None:
        """Let the block run until it waits again or ends."""
        self._enter(self._greenlet.switch, value)

    def throw(self, error: BaseException) -> None:
        """Raise `error` in the block, at the line where it waits."""
        if self._greenlet:
            self._enter(self._greenlet.throw, error)
        else:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the block with `error`, which it is not given a chance to handle."""
        self.stood = self._greenlet.stands() or self.stood
        self.kill()
        self.error = error

    def end(self) -> None:
        """The generation is over: loops over steps end, what follows them runs, and no location comes any more."""
        self.ended, self.visit = True, None
        if self.planned is not None:
            self.kill()
        for _ in range(PATIENCE):
            if self.finished or self.waits is None:
                return
            if isinstance(self.waits, StepStart):
                self.resume(False)
            else:
                self.throw(self._late())
        self.kill()

    def _late(self) -> GenerationEndedError:
        """What a block is told that waits for something when the last step is over."""
        if not isinstance(self.waits, Location):
            return GenerationEndedError(f"{self.waits}: the last step of the generation is over")
        return GenerationEndedError(f"{self.asked} was asked for after the last step of the generation")

    def dismiss(self) -> None:
        """Do no more in any step, without an error."""
        self.kill()
        self.ended = True

    def kill(self) -> None:
        """Unwind the block without letting it go on."""
        self._killed = True
        for _ in range(PATIENCE):  # a block may catch the exit and wait again
            if not self._greenlet:
                break
            self._turn(self._greenlet.throw, greenlet.GreenletExit)
        self.finished, self.waits = True, None

    def _enter(self, switch: Callable[[Any], object], value: Any) -> None:
        before = self._interleaver.modes
        self.waits = None
        if not self._turn(switch, value):
            self.fail(timeout_error(self._timeout))
        if self.watched and Modes.now() != before:
            self.fail(NNsightError(MODES_CHANGED))
            before.restore()

    def _turn(self, switch: Callable[[Any], object], value: Any) -> bool:
        """Hand the thread to the block; False if the watchdog had to take it back."""
        interleaver, stdout = self._interleaver, sys.stdout
        watchdog, prints, grad_mode = interleaver.watchdog, interleaver.setting.own_process, _grad_enabled()
        self._hub = greenlet.getcurrent()
        if self._greenlet.parent is not self._hub:
            self._greenlet.parent = self._hub
        try:
            if self._grad_mode is not None and self._grad_mode != grad_mode:
                torch.set_grad_enabled(self._grad_mode)
            watchdog.begin(min(self._timeout, UNWINDING) if self._killed else self._timeout)
            interleaver.running = True
            if prints:
                sys.stdout = self.console
            abandoned = switch(value) is ABANDONED
        except Expired:  # raised when the block was about to end
            return False
        finally:
            try:
                watchdog.end()
            except Expired:  # it comes with a delay, where no signal brings it
                watchdog.end()
            self._grad_mode = _grad_enabled()
            if self._grad_mode != grad_mode:
                torch.set_grad_enabled(grad_mode)
            if prints:
                sys.stdout = stdout
            interleaver.running = False
        if abandoned:
            self.stood = self._greenlet.stands()
            self._greenlet = BlockGreenlet(self._main, self)
            return False
        return True

    def _main(self, _: Any = None) -> None:
        try:
            assert self.program is not None
            self.program(self._interleaver.model, self.tracer)
        except _Stop:
            pass
        except greenlet.GreenletExit as error:
            self.error = None if self._killed else error
        except BaseException as error:
            self.error = said(error, self._timeout)
        finally:
            self.finished = True

    # -- called by the block ---------------------------------------------------------------------------------------

    @property
    def differentiable(self) -> bool | None:
        return self._interleaver.differentiable

    def read(self, location: Location) -> Any:
        if location.kind == "input":
            return self.read_view(location, _FIRST_ARGUMENT)
        return self._at(location).get()

    def write(self, location: Location, value: Any) -> None:
        if location.kind == "input":
            self.write_view(location, _FIRST_ARGUMENT, value)
        else:
            self._at(location).set(value)

    def read_view(self, location: Location, view: View, written: str = "") -> Any:
        return self._at(location, written).see(view, written or location)

    def write_view(self, location: Location, view: View, part: Any, written: str = "") -> None:
        self._at(location, written).show(view, part, written or location)

    def save(self, value: Any, name: str | None = None, label: str | None = None) -> Any:
        if name is None:
            name = label or "save"
            if self.saves.would_replace(name, value):
                warn(REPLACED.format(name))
        self.saves.add(name, value)
        return value

    def carry(self, values: Mapping[str, Any], names: Sequence[str]) -> None:
        if self.stopped or sys.exception() is None:  # else the block fails, or is ended
            for name in names:
                if name in values:
                    with suppress(SaveError):  # such as a module: it stays where it is
                        self.saves.add(name, values[name])

    def module(self, path: str) -> torch.nn.Module:
        return self._interleaver.module(path)

    def attribute(self, path: str, name: str, default: object) -> Any:
        value = getattr(self.module(path), name, default)
        return value if value is default else self._interleaver.lend(path, name, value)

    def call(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.saves.copy_at_once()  # vLLM's norms change what they are given
        return self._interleaver.call(path, args, kwargs)

    def collect(self, modules: Iterable[Any] | None, include_inputs: bool) -> Cache:
        """Start a cache of what passes at `modules`."""
        cache = Cache(self._interleaver.events_of(modules, include_inputs))
        self.caches.append(cache)
        self._interleaver.collect(self, cache, self.clock)
        return cache

    def stop(self) -> NoReturn:
        self.stopped = True
        raise _Stop

    def reach(self, step: int) -> bool:
        """Wait for `step` to begin; False if the generation ends first."""
        if self.ended or (step > self.step and not self.park(StepStart(step))):
            return False
        self.next_step = step + 1
        return True

    def _at(self, location: Location, written: str = "") -> Visit:
        event = self._interleaver.events.get(location) or self._interleaver.event(location)
        visit = self.visit
        if visit is None or visit.event != event:
            self.asked = written or location
            self._check(event, self.asked)
            self.waits = event
            self._hub.switch()
            visit = self.visit
            assert visit is not None
        return visit

    def _check(self, event: Location, asked: object) -> None:
        if self.ended:
            raise GenerationEndedError(f"{asked} was asked for after the last step of the generation")
        self._interleaver.check(event)
        if event.operation:
            self.looks_inside = True
        self.coming = self._interleaver.order.after(event, self.clock)
        if self.coming is None or (event.operation and self._passed(event)):
            raise OutOfOrderError(
                f"{asked} has already been passed in step {self.step}: a block reads locations in the order in which "
                "the model computes them; read it earlier, or in the next step of `for step in tracer.iter[:]`"
            )

    def _passed(self, operation: Location) -> bool:
        """Whether the call that goes on has surely gone by an operation."""
        interleaver = self._interleaver
        return interleaver.order.once(operation.path) and interleaver.sites.inside.passed(operation, self.place)

    def park(self, wanted: Any) -> Any:
        """Hand the thread back until what is wanted is there."""
        self.waits = wanted
        return self._hub.switch()
