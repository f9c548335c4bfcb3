"""Every exception of the package.

NNsightError
├── CaptureError         (RuntimeError)    the body of a `with` cannot be turned into a block
├── ShippingError        (TypeError)       a value that the block uses cannot travel to the worker
├── LocationError        (AttributeError)  a path that the model does not have, or what cannot be assigned there
├── ItemError            (LocationError, IndexError) an index past the end of a list of modules
├── NotAListError        (LocationError, TypeError)  an index or a loop where there is no list of modules
├── UnreadableError      (LocationError)   a module that exists but never passes a value we can read
├── OutsideBlockError    (RuntimeError)    a location touched where no block runs
├── OutOfOrderError      (RuntimeError)    a location that this step has already passed
├── NotComputedError     (OutOfOrderError) a location that this step did not reach
├── GenerationEndedError (OutOfOrderError) a location asked for after the last step
├── NotATapError         (LocationError)   a location that a tapped engine does not serve
├── NotASiteError        (LocationError)   a layer where an engine that replays graphs applies no operations
├── OpLimitError         (RuntimeError)    more declared operations than an engine has room for
├── ShapeError           (ValueError)      a replacement with other rows, width or structure
├── IsolationError       (RuntimeError)    a value that cannot be narrowed to this run's rows
├── SplitPromptError     (RuntimeError)    a prompt that the scheduler cut in pieces
├── SaveError            (TypeError)       a value that cannot be saved
├── NotSavedError        (LookupError)     a name that the block never saved
├── BlockTimeoutError    (TimeoutError)    a block that ran on past `block_timeout`
├── SaveBudgetError      (RuntimeError)    a run saved more bytes than `max_save_bytes`
├── BlockError           (RuntimeError)    an exception of the block that cannot be raised here as it was
├── RunCancelledError    (RuntimeError)    the run was cancelled before the value was there
├── MainGuardError       (RuntimeError)    a script builds an engine outside `if __name__ == "__main__":`
├── SurfaceError         (RuntimeError)    the synchronous form used on an async model, or the reverse
├── ValuesLostError      (ConnectionError) saved values that did not come home, or came damaged
├── ServerError          (ConnectionError) a server that cannot be reached, or that refuses
├── EngineStartError     (RuntimeError)    vLLM did not start
├── UnsupportedError     (NotImplementedError) what vLLM or this version cannot do
├── StageError           (RuntimeError)    a block that did not do the same on every stage of a pipeline
├── EngineClosedError    (RuntimeError)    the model was closed
└── EngineDeadError      (RuntimeError)    the engine's processes ended
"""

from __future__ import annotations


class NNsightError(Exception):
    """Base class of every exception that this package raises on its own account."""


class CaptureError(NNsightError, RuntimeError):
    """The body of a `with` cannot be turned into a block; the message says what to write instead."""


class ShippingError(NNsightError, TypeError):
    """A value that the block uses cannot travel to the worker; the message names the variable."""


class LocationError(NNsightError, AttributeError):
    """A path that the model does not have, or that cannot be assigned; the message lists the nearest ones.

    So is an attribute that a tracer does not have.
    """


class ItemError(LocationError, IndexError):
    """An index past the end of a list of modules."""


class NotAListError(LocationError, TypeError):
    """An index, a length or a loop of what is no list of modules."""


class UnreadableError(LocationError):
    """A module that exists but never passes a value that can be read; the message gives the reason."""


class NotATapError(LocationError):
    """A location that was not declared in `taps=` on an engine that replays graphs."""


class NotASiteError(LocationError):
    """A layer that was not declared in `op_sites=`, on an engine that applies declared operations there alone."""


class OpLimitError(NNsightError, RuntimeError):
    """The requests of an engine use more declared operations at a time than it has room for."""


class OutsideBlockError(NNsightError, RuntimeError):
    """A location was touched in code that does not run as a block."""


class OutOfOrderError(NNsightError, RuntimeError):
    """A location was asked for after the forward pass had gone by it in this step."""


class NotComputedError(OutOfOrderError):
    """A location was waited for and the step ended without reaching it."""


class GenerationEndedError(OutOfOrderError):
    """A location was asked for after the last step of the generation."""


class ShapeError(NNsightError, ValueError):
    """A replacement whose rows, width or structure differ from the value it replaces."""


class IsolationError(NNsightError, RuntimeError):
    """A value that mixes rows of several requests and cannot be narrowed to one, or a change to what they all share."""


class SplitPromptError(NNsightError, RuntimeError):
    """The scheduler ran the prompt in several pieces, so a block cannot see it in one step."""


class SaveError(NNsightError, TypeError):
    """A value of a type that cannot be saved."""


class NotSavedError(NNsightError, LookupError):
    """A name that the block was to save and never did."""


class BlockTimeoutError(NNsightError, TimeoutError):
    """A block ran longer than `block_timeout` between two locations."""


class SaveBudgetError(NNsightError, RuntimeError):
    """A run saved more bytes than its `max_save_bytes`."""


class BlockError(NNsightError, RuntimeError):
    """An exception raised inside a block that cannot be raised here as it was.

    Its class does not exist in this process, or raising it would act on the caller: `SystemExit`, `KeyboardInterrupt`,
    `asyncio.CancelledError`, `GeneratorExit`, `StopIteration`. Where it can be rebuilt it is the `__cause__`.
    """


class RunCancelledError(NNsightError, RuntimeError):
    """The run was cancelled before the value that was waited for had arrived."""


class SlowConsumerError(NNsightError, BufferError):
    """More saved values waited for the reader of a stream than a run may keep for it."""


class AdapterError(NNsightError, ValueError):
    """A LoRA adapter cannot be loaded, or is not the one that the engine knows under that name or number."""


class MainGuardError(NNsightError, RuntimeError):
    """A script builds an engine outside `if __name__ == "__main__":`."""


class SurfaceError(NNsightError, RuntimeError):
    """The synchronous form was used on an async model, or the other way round."""


class ValuesLostError(NNsightError, ConnectionError):
    """What a run saved was lost or damaged on its way from the worker; the run can be tried again."""


class ServerError(NNsightError, ConnectionError):
    """A server cannot be reached, ended the connection, or refused what was asked; the message has its reason.

    `status` is that of its answer; None where there was none.
    """

    status: int | None = None


class EngineStartError(NNsightError, RuntimeError):
    """vLLM did not start; the message carries its last words."""


class UnsupportedError(NNsightError, NotImplementedError):
    """What vLLM, or this version of the package, cannot do; the message says where it can be done."""


class StageError(NNsightError, RuntimeError):
    """The stages of a pipeline cannot go on together: a block did not do the same on each, or one does not answer."""


class EngineClosedError(NNsightError, RuntimeError):
    """The model was closed; build a new one."""


class EngineDeadError(NNsightError, RuntimeError):
    """The processes of the engine ended; close the model and build a new one."""
