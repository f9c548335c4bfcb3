"""Blocks that run on every request of an engine: `with model.edit() as (tracer, edit):`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from nnsight_async.capture.block import Block
from nnsight_async.errors import OutsideBlockError
from nnsight_async.runs.body import BodyStatement, Ready, caller, check_awaiting_allowed, check_blocking_allowed
from nnsight_async.runs.handle import block_of
from nnsight_async.runs.trace import Tracer

if TYPE_CHECKING:
    from nnsight_async.capture.body import BodyCapture
    from nnsight_async.runs.ops import Op

NO_BLOCK = Block(b"", (), "", 0, "")
FORM = "with model.edit() as (tracer, edit)"

_numbers = count(1).__next__


@dataclass(frozen=True, slots=True)
class Installed:
    """A block for every request. `rowwise`: what it does to a row depends on that row alone.

    With `ops`, those are all that it does, and its block is `NO_BLOCK`.
    """

    block: Block
    name: str | None
    rowwise: bool
    number: int = field(default_factory=_numbers)
    ops: tuple[Op, ...] = ()

    @property
    def place(self) -> str:
        return f"{Path(self.block.filename).name}:{self.block.first_line}"

    def __str__(self) -> str:
        if self.name is not None:
            return f"the edit {self.name!r}"
        return f"the edit of {', '.join(map(repr, self.ops)) or self.place}"


def of_operations(ops: tuple[Op, ...], name: str | None) -> Installed:
    """An edit of declared operations. Where they act at all positions, a row is changed by what it is alone."""
    return Installed(NO_BLOCK, name, all(op.positions is None for op in ops), ops=ops)


class Editor(Protocol):
    """What edits are installed on: a model."""

    def install(self, edit: Installed) -> None:
        """Have every request that is submitted from now on run `edit`."""
        ...

    async def ainstall(self, edit: Installed) -> None:
        """`install`, without blocking the event loop."""
        ...

    def uninstall(self, edits: Iterable[Installed] | None) -> Any:
        """End edits, or all of them; to be awaited where an event loop runs."""
        ...

    def owners(self) -> Sequence[object]:
        """What the modules belong to that the blocks of edits may use."""
        ...


class Edit:
    """An edit of an engine, from the end of its `with` to `clear()`."""

    __block_advice__ = "an edit cannot be cleared from its own block; clear it outside"

    def __init__(self, editor: Editor) -> None:
        self._editor = editor
        self._installed: Installed | None = None

    @property
    def name(self) -> str | None:
        """The name by which requests choose it."""
        return None if self._installed is None else self._installed.name

    def clear(self) -> Any:
        """End the edit, for the requests that go on too; `await edit.clear()` on a model of mode "async".

        Complete when it returns: no step that begins later is edited. Clearing again does nothing.
        """
        if self._installed is None:
            raise OutsideBlockError("the edit is installed when its `with` ends; it can be cleared from there on")
        return self._editor.uninstall([self._installed])

    def attach(self, installed: Installed) -> Edit:
        """This is what has been installed."""
        self._installed = installed
        return self

    def __repr__(self) -> str:
        return f"<{self._installed or 'an edit that is not installed yet'}>"


class EditTracer(Tracer):
    """The tracer in the block of an edit. What it leads to belongs to requests, of which there may be many."""

    def _started(self) -> NoReturn:
        raise OutsideBlockError(
            "an edit has no tokens and values of its own: they come with the requests that run it, as "
            "`output.saves`, `tracer.result.saves` and on the tokens of their streams"
        )


class EditBody(BodyStatement):
    """The context manager that `model.edit()` returns; its body becomes the block of the edit."""

    def __init__(self, editor: Editor, name: str | None, *, rowwise: bool, asynchronous: bool) -> None:
        self._editor = editor
        self._name = name
        self._rowwise = rowwise
        self._asynchronous = asynchronous
        self._tracer = EditTracer(asynchronous)
        self._edit = Edit(editor)

    def __enter__(self) -> tuple[Tracer, Edit]:
        check_blocking_allowed(self._asynchronous, FORM)
        return self._skip(caller(), (self._tracer, self._edit))

    def __aenter__(self) -> Ready[tuple[Tracer, Edit]]:
        check_awaiting_allowed(self._asynchronous, FORM)
        return Ready(self._skip(caller(), (self._tracer, self._edit)))

    def _finish(self, capture: BodyCapture) -> None:
        installed = self._installed(capture)
        self._editor.install(installed)
        self._edit.attach(installed)

    async def _afinish(self, capture: BodyCapture) -> None:
        installed = self._installed(capture)
        await self._editor.ainstall(installed)
        self._edit.attach(installed)

    def _installed(self, capture: BodyCapture) -> Installed:
        return Installed(block_of(self._editor, capture, self._tracer), self._name, self._rowwise)
