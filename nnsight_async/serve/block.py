"""Blocks on their way to a server: as data where they can be that, and as Python where the server takes it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from nnsight_async.capture.block import Block
from nnsight_async.capture.function import from_function
from nnsight_async.capture.recompile import text_of
from nnsight_async.capture.text import Text
from nnsight_async.errors import CaptureError, LocationError
from nnsight_async.serve import messages as m
from nnsight_async.serve import operations as ops
from nnsight_async.serve import wire
from nnsight_async.serve.declare import declared
from nnsight_async.serve.source import source_of
from nnsight_async.tree.manifest import Manifest

REFUSES = (
    "The server takes blocks of declared operations alone (docs/serving.md says which those are); one that is started "
    "with --allow-python takes any"
)


@dataclass(frozen=True, slots=True)
class ServedBlock(Block):
    """A block with its form as data, or with the reason why it has none, and its text, or its bytes, as Python."""

    statements: msgspec.Raw | None = None
    tensors: tuple[torch.Tensor, ...] = field(default=(), repr=False)
    reason: CaptureError | None = None
    source: m.Source | None = None

    def code(self, description: m.Description) -> tuple[Any, list[torch.Tensor]]:
        """What to send: the block of a request, and its buffers. Raises `CaptureError` for what the server refuses."""
        if self.statements is not None:
            return {"type": "declared", "statements": self.statements}, list(self.tensors)
        if not description.allow_python:
            assert self.reason is not None
            raise CaptureError(f"{self.reason}. {REFUSES}").with_traceback(self.reason.__traceback__)
        if self.source is None:
            return m.Python([constant.digest for constant in self.constants]), self._pickle()
        return self.source, [*self.tensors, *(self._pickle() if self.payload else ())]

    def _pickle(self) -> list[torch.Tensor]:
        payload = torch.frombuffer(bytearray(self.payload), dtype=torch.uint8)
        return [payload, *(constant.content for constant in self.constants)]


def of_text(text: Text, whole: Callable[[], Block], owners: Collection[object]) -> ServedBlock:
    """The block of a text; `whole` makes one of Python as a pickle, which is only asked for if there is no other."""
    try:
        statements = declared(text.body, _own(text.seen, owners), text.filename, owners)
        _check(statements, text, owners)
    except CaptureError as error:
        reason = error.with_traceback(text.traceback)
        found = source_of(text, owners)
        if found is not None:
            place = text.names, text.filename, text.first_line, text.function
            return ServedBlock(
                found.payload, *place, found.constants, reason=reason, source=found.source, tensors=found.tensors
            )
        python = whole()
        return ServedBlock(
            python.payload, python.names, python.filename, python.first_line, python.function, python.constants,
            reason=reason,
        )  # fmt: skip
    tensors: list[torch.Tensor] = []
    for node in ops.nodes(statements):
        if isinstance(node, ops.Value):
            node.value = wire.pack(node.value, tensors)
    kept = tuple(tensor.detach().cpu().clone() for tensor in tensors)  # as they are now
    raw = msgspec.Raw(msgspec.msgpack.encode(statements))
    return ServedBlock(b"", text.names, text.filename, text.first_line, text.function, statements=raw, tensors=kept)


def of_probe(probe: Callable[[Any, Any], object], owners: Collection[object], model: object) -> ServedBlock:
    """The block of a function of (model, tracer)."""
    text = text_of(probe, model)
    if text is None:
        python = from_function(probe, owners)
        why = f"{python.filename}, line {python.first_line}: this probe is no function whose text can be had"
        return ServedBlock(
            python.payload, python.names, python.filename, python.first_line, python.function, python.constants,
            reason=CaptureError(why),
        )  # fmt: skip
    return of_text(text, lambda: from_function(probe, owners), owners)


def _check(statements: list[ops.Statement], text: Text, owners: Collection[object]) -> None:
    """Raise `CaptureError` for what a server would refuse, who says it of the whole block."""
    manifest = next((owner for owner in owners if isinstance(owner, Manifest)), None)
    try:
        if manifest is not None:
            ops.check(statements, manifest)
    except (ValueError, LocationError) as error:
        where = f"{text.filename}, line {text.first_line}"
        raise CaptureError(f"{where}: this block cannot travel as data: {error}") from None


def _own(seen: Callable[[str], Any], owners: Collection[object]) -> Callable[[str], Any]:
    """`seen`, which does not know what belongs to another model or trace."""

    def look(name: str) -> Any:
        value = seen(name)
        owner = getattr(value, "__block_owner__", None) if hasattr(type(value), "__block_reference__") else None
        if owner is not None and not any(owner is known for known in owners):
            raise KeyError(name)
        return value

    return look
