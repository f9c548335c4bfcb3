"""One generated token, with what was saved in the step that drew it."""

from __future__ import annotations

from typing import Any

import msgspec

from nnsight_async.runs.unread import looked_at


class Token(msgspec.Struct, frozen=True, gc=False):
    """A token of a stream.

    Attributes:
        id: its number in the vocabulary.
        text: the text that it adds; empty while a character is not complete.
        index: 0 for the first token that is generated; also the number of the step that drew it.
        logprob: natural logarithm of its probability, where `logprobs=` was asked for.
        saves: values saved in its step, by name; a list or dict as it stood at the end of the step.
        finish_reason: on the last token, vLLM's reason ("length", "stop", ...); else None.
        invoke: which of the invokes of a trace it belongs to, from 0.
        sequence: which of the `n` sequences of its prompt it belongs to, from 0.
        dropped: whether values that its step saved were dropped before they were read (`slow_consumers="drop"`).
    """

    # A struct is made in a tenth of the time of a frozen dataclass. Runs keep all of their tokens: if the garbage
    # collector looked after them, it would look through the whole heap the more often. They are in no cycles.

    id: int
    text: str
    index: int
    logprob: float | None = None
    saves: dict[str, Any] = {}
    finish_reason: str | None = None
    invoke: int = 0
    sequence: int = 0
    dropped: bool = False


_saves: Any = Token.saves  # which may be `Unread`: made values when they are asked for
Token.saves = property(lambda token: looked_at(_saves.__get__(token)))  # type: ignore[assignment, misc]
