"""What a server accepts, and what becomes of it: a request of a client as a run of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nnsight_async.capture.block import Block
from nnsight_async.capture.load import VERSION as PYTHON
from nnsight_async.capture.ship import dumps
from nnsight_async.engine.prompts import vllm_prompt
from nnsight_async.engine.sampling import settings
from nnsight_async.runs.keywords import PLAIN
from nnsight_async.serve import messages as m
from nnsight_async.serve import operations as ops
from nnsight_async.serve.held import Room
from nnsight_async.serve.program import PLACE, Program
from nnsight_async.serve.python import block_of
from nnsight_async.serve.uploads import Refused
from nnsight_async.serve.wire import Bounds, Buffers, Received, WireError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nnsight_async.runs.request import Request
    from nnsight_async.serve.access import Key
    from nnsight_async.tree.manifest import Manifest

LONGEST_TOKEN = 128
"""Characters that a token of a prompt may have, on the average."""

CODE = "<a block of Python>"
"""The file of a block whose text only its client has."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What one client may take; each is answered with a reason where it is passed.

    Attributes:
        body: bytes of a request.
        upload_seconds: how long a request may take to arrive.
        runs: runs of one key at a time.
        run_seconds: how long a run may take.
        waiting: bytes that wait for a client which is slow to take them.
        beat: seconds after which a quiet stream says that it is alive.
        head_seconds: how long the head of a request may take to arrive.
        edits: edits of one key.
        uploads: bytes of one key's requests that go, and of its edits.
        block_bytes: bytes of tensors that a block of data may hold at a time.
        all_block_bytes: bytes that all of those hold together.
    """

    body: int = 64 << 20
    upload_seconds: float = 60.0
    runs: int = 256
    run_seconds: float = 3600.0
    waiting: int = 256 << 20
    beat: float = 15.0
    head_seconds: float = 20.0
    edits: int = 64
    uploads: int = 1 << 30
    block_bytes: int = Room().own
    all_block_bytes: int = Room().together

    @property
    def bounds(self) -> Bounds:
        """Those of a message from a client."""
        return Bounds(header=min(8 << 20, self.body), total=self.body, items=200_000, depth=32)

    @property
    def room(self) -> Room:
        return Room(self.block_bytes, self.all_block_bytes)


@dataclass(frozen=True, slots=True)
class Policy:
    """What is accepted, on one model."""

    manifest: Manifest
    allow_python: bool
    loras: Mapping[str, Any]
    """vLLM's `LoRARequest`s by the names that the server was started with."""
    max_model_len: int
    room: Room | None = None
    """Of a block of data."""

    def block(self, code: m.Code, buffers: Buffers, names: list[str], key: Key) -> Block:
        """The block of a request. `Refused` for one of Python where that is not allowed: it is not even looked at."""
        if isinstance(code, m.Declared):
            return self.block_of(m.statements_of(code, buffers), names)
        if not self.allow_python:
            raise Refused(
                403,
                "CaptureError",
                "this server takes blocks of declared operations alone, and this one is Python: ask whoever runs it "
                "for --allow-python, or write the block with what docs/serving.md lists",
            )
        if not key.may("python"):
            raise Refused(403, "PermissionError", f"the key {key.name!r} has not the scope 'python'")
        return block_of(code, buffers, names, CODE)

    def request(self, asked: m.RunRequest) -> Request:
        """What is asked of vLLM; raises as `settings` and `vllm_prompt` do."""
        unknown = sorted(asked.sampling.keys() - PLAIN)
        if unknown:
            raise TypeError(f"a served run got an unexpected keyword argument {unknown[0]!r}")
        if asked.sampling.get("n", 1) != 1:
            raise ValueError("n: a served run is one sequence; send one request for each")
        request = settings({**asked.sampling, "edits": asked.edits, "priority": asked.priority}, "trace()")
        if len(asked.prompt) > self.max_model_len * (LONGEST_TOKEN if isinstance(asked.prompt, str) else 1):
            unit = "characters" if isinstance(asked.prompt, str) else "tokens"
            raise ValueError(  # before everybody waits until it has been tokenized
                f"a prompt of {len(asked.prompt):,} {unit}; the model takes max_model_len={self.max_model_len:,} tokens"
            )
        prompt: dict[str, Any] = (
            {"prompt": asked.prompt} if isinstance(asked.prompt, str) else {"prompt_token_ids": asked.prompt}
        )
        if asked.cache_salt is not None:
            prompt["cache_salt"] = asked.cache_salt
        request.prompt = vllm_prompt(prompt, _no_chat)
        if asked.lora is not None:
            if asked.lora not in self.loras:
                raise ValueError(
                    f"lora_request={asked.lora!r}: this server has {', '.join(self.loras) or 'no adapter'}"
                )
            request.lora = self.loras[asked.lora]
        return request

    def block_of(self, statements: list[ops.Statement], names: list[str]) -> Block:
        """A block of data; raises what `operations.check` does. The bytes that the worker loads are made here."""
        ops.check(statements, self.manifest)
        pickled = dumps(Program(statements, self.room), frozenset())
        return Block(PYTHON + pickled.payload, tuple(names), PLACE, 0, "block", pickled.constants)


def _no_chat(messages: Any) -> list[int]:
    raise TypeError("a chat is turned into token ids by the client")


def opened(body: bytes, bounds: Bounds) -> Received[m.Request]:
    """A request; `Refused` for bytes that are none."""
    try:
        return m.take(body, bounds)
    except WireError as error:
        raise Refused(400, "ValueError", str(error)) from None
