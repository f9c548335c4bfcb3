"""Edits that a client installs on a server."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from nnsight_async.serve import messages as m
from nnsight_async.serve import wire
from nnsight_async.serve.block import ServedBlock
from nnsight_async.serve.ops import said

if TYPE_CHECKING:
    from nnsight_async.runs.edit import Installed
    from nnsight_async.serve.remote import Remote


class RemoteEdits:
    """The edits that this client has installed on a server."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._there: dict[int, tuple[Installed, int]] = {}
        """By their numbers here: each, with its number there."""

    @property
    def installed(self) -> tuple[Installed, ...]:
        return tuple(edit for edit, _ in self._there.values())

    async def install(self, edit: Installed) -> None:
        """Have every request of the server run `edit`, whoever sends it; raises what the server refuses."""
        code, tensors = None, []
        if not edit.ops:
            assert isinstance(edit.block, ServedBlock)
            code, tensors = edit.block.code(await self._remote.describe())
        asked = m.EditRequest(secrets.token_hex(16), code, edit.name, edit.rowwise, said(edit.ops))
        answer = await self._remote.request("POST", "/edits", wire.encode(asked, tensors))
        self._there[edit.number] = edit, msgspec.msgpack.decode(answer, type=m.EditInfo).number

    async def clear(self, numbers: Iterable[int] | None = None) -> None:
        """End edits of this client (None: all that were made with its key)."""
        if numbers is None:
            await self._remote.request("DELETE", "/edits")
            self._there.clear()
            return
        for number in [number for number in numbers if number in self._there]:
            await self._remote.request("DELETE", f"/edits/{self._there[number][1]}")
            self._there.pop(number, None)
