"""What a client and a server say to each other, inside the envelopes of `wire.py`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from nnsight_async.serve import operations as ops
from nnsight_async.serve import wire
from nnsight_async.serve.ops import Operations
from nnsight_async.serve.wire import Bounds, Received

Id = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
Short = Annotated[str, msgspec.Meta(max_length=500)]
Token = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]

Setting = (
    None
    | bool
    | int
    | float
    | str
    | Annotated[list[int | float | str], msgspec.Meta(max_length=1 << 18)]
    | Annotated[dict[int | str, int | float], msgspec.Meta(max_length=1 << 18)]
)
"""A value of a sampling parameter. Its type and its length are looked at before it is made."""
Sampling = Annotated[dict[Short, Setting], msgspec.Meta(max_length=100)]
Names = Annotated[list[Short], msgspec.Meta(max_length=10_000)]


# -- from the client ---------------------------------------------------------------------------------------------------


class Declared(msgspec.Struct, tag="declared", forbid_unknown_fields=True):
    """A block as data: a list of `operations.Statement`, whose values are as `wire.pack` gives them."""

    statements: msgspec.Raw


Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Constants = Annotated[list[Digest], msgspec.Meta(max_length=10_000)]


class Python(msgspec.Struct, tag="python", forbid_unknown_fields=True):
    """A block of Python: its bytes are the first buffer, and its large constants the others, by their SHA-256."""

    constants: Constants = []


class Value(msgspec.Struct, tag="value", forbid_unknown_fields=True):
    """A plain value, as `wire.pack` gives it."""

    value: msgspec.Raw


class Module(msgspec.Struct, tag="reference", forbid_unknown_fields=True):
    """The model, the tracer, or a module: what `__block_reference__` gives."""

    reference: Annotated[list[Short], msgspec.Meta(min_length=1, max_length=8)]


class Import(msgspec.Struct, tag="import", forbid_unknown_fields=True):
    """A module, or `path` in it, that both sides have installed."""

    module: Short
    path: Short = ""


class Pickled(msgspec.Struct, tag="pickled", forbid_unknown_fields=True):
    """A value that has no other form: the pickle that comes after the tensors has it under its name."""


Outer = Value | Module | Import | Pickled


class Source(msgspec.Struct, tag="source", forbid_unknown_fields=True):
    """A block of Python as its text, with the values around it: see `capture.text.Written`.

    `free` and `entries` have those of the names that have a value, in the order of `Written`. Where one of them is
    `Pickled`, the buffers after those of the tensors are as those of `Python`.
    """

    text: str
    filename: Annotated[str, msgspec.Meta(max_length=4096)]
    first_line: ops.Line
    """Of the text."""
    lines: tuple[ops.Line, ops.Line]
    parameters: Annotated[list[Short], msgspec.Meta(min_length=2, max_length=2)]
    free: Annotated[dict[Short, Outer], msgspec.Meta(max_length=10_000)]
    entries: Annotated[dict[Short, Outer], msgspec.Meta(max_length=10_000)]
    function: Short
    qualname: Short
    class_name: Short | None = None
    annotations: bool = False
    module: Short = ""
    constants: Constants = []


Code = Declared | Python | Source


class RunRequest(msgspec.Struct, tag="run", forbid_unknown_fields=True):
    """One run. `id` is the client's, and a second run of that id is refused: who asks again gets no second run."""

    id: Id
    prompt: str | list[Token]
    sampling: Sampling = {}
    edits: Names | None = None
    priority: int = 0
    lora: Short | None = None
    cache_salt: Short | None = None
    names: Names = []
    block: Code | None = None
    ops: Operations | None = None


class EditRequest(msgspec.Struct, tag="edit", forbid_unknown_fields=True):
    """What every request runs from now on: a block, or declared operations."""

    id: Id
    block: Code | None
    name: Short | None = None
    rowwise: bool = False
    """Of a block; of operations it is known."""
    ops: Operations | None = None


Request = RunRequest | EditRequest
requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)


_statements: msgspec.msgpack.Decoder[list[ops.Statement]] = msgspec.msgpack.Decoder(list[ops.Statement])


def statements_of(code: Declared, buffers: wire.Buffers) -> list[ops.Statement]:
    """The statements of a block of data, with their values; `WireError` for what are none."""
    statements = buffers.open(code.statements, _statements)
    for node in ops.nodes(statements):
        if isinstance(node, ops.Value):
            node.value = buffers.unpack(node.value)
    buffers.finish()
    return statements


# -- from the server ---------------------------------------------------------------------------------------------------


class Part(msgspec.Struct, array_like=True):
    """An edit that a run runs: its name, and the file and line where it was made."""

    name: str | None
    filename: str
    line: int


class Begun(msgspec.Struct, tag="begun", array_like=True):
    """The run has been handed to the engine, and runs these edits before its own block."""

    parts: list[Part]
    operated: bool = False
    """Whether declared operations act on it, those of edits among them."""


class Delta(msgspec.Struct, tag="delta", array_like=True):
    """What is new in vLLM's output: fields of its `RequestOutput` and of the one `CompletionOutput` in it.

    `logprobs` has, for each token, pairs of an id and `[logprob, rank, decoded token]`.
    """

    request_id: str
    token_ids: list[int]
    text: str
    finished: bool
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[list[tuple[int, tuple[float, int | None, str | None]]]] | None = None
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[list[tuple[int, tuple[float, int | None, str | None]]] | None] | None = None
    num_cached_tokens: int | None = None


class Saved(msgspec.Struct, tag="saved", array_like=True):
    """A `Frame` of the worker; see there. Values are as `wire.pack` gives them, and `error` as `failures.carried`."""

    step: int
    entries: list[tuple[str, str, Any]]
    done: bool
    stopped: bool
    ended: bool
    error: bytes | None
    printed: str
    warned: list[tuple[str, str, str, int]]
    size: int
    part: int
    number: int


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """The run has ended with this error, as `failures.carried` gives it."""

    error: bytes


class Alive(msgspec.Struct, tag="alive", array_like=True):
    """Nothing has come for a while, and the server is there."""


class Ended(msgspec.Struct, tag="ended", array_like=True):
    """All has been said of the run."""


Reply = Begun | Delta | Saved | Failed | Alive | Ended
replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)

REPLY_BOUNDS = Bounds(header=64 << 20, total=2 << 30, items=4 << 20)


class Description(msgspec.Struct):
    """What a server tells of its model: the tree, and what it takes."""

    model: str
    manifest: bytes
    allow_python: bool
    """Whether it takes blocks of Python from who asks."""
    python: tuple[int, int]
    """The version of Python that its worker runs."""
    runs: int
    """How many runs of one key go at a time."""
    uploads: int
    """How many bytes its requests have together."""
    taps: list[str] = []
    """Where blocks may look; empty if that is everywhere."""


class EditInfo(msgspec.Struct):
    """An edit, as the server lists it. `own`: it was made with the key that asks."""

    number: int
    name: str | None
    rowwise: bool
    own: bool


class Refusal(msgspec.Struct):
    """The body of an answer that refuses: the class of the error that a local call would raise, and its message."""

    kind: str
    message: str


Scope = Literal["trace", "edit", "python", "admin"]


def take(data: wire.Buffer, bounds: Bounds) -> Received[Request]:
    """A request as it came; `WireError` for what is none."""
    return wire.decode(data, requests, bounds)
