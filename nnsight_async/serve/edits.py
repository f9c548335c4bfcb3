"""The edits of a server's clients: whose each is, and how many and how large they may be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from nnsight_async.runs.edit import Installed
from nnsight_async.serve import messages as m
from nnsight_async.serve.uploads import Refused, Uploads

if TYPE_CHECKING:
    from nnsight_async.engine.engine import Engine
    from nnsight_async.serve.access import Key
    from nnsight_async.vllm import VLLM


class Owner(NamedTuple):
    """The name of a key, and the bytes of its edit."""

    key: str
    size: int


class ServedEdits:
    """Lives on the engine's loop."""

    def __init__(self, model: VLLM, engine: Engine, uploads: Uploads, most: int) -> None:
        self._model = model
        self._engine = engine
        self._uploads = uploads
        self._most = most
        self._owners: dict[int, Owner] = {}
        self._installing: set[int] = set()

    def owns(self, key: Key, edit: Installed) -> bool:
        """Whether an edit was made with this key."""
        owner = self._owners.get(edit.number)
        return owner is not None and owner.key == key.name

    def infos(self, key: Key) -> list[m.EditInfo]:
        """All that are installed, as this key sees them."""
        return [self.info(edit, key) for edit in self._engine.edits.installed]

    def info(self, edit: Installed, key: Key) -> m.EditInfo:
        return m.EditInfo(edit.number, edit.name, edit.rowwise, self.owns(key, edit))

    def check(self, key: Key) -> None:
        """`Refused` for who may have no more."""
        self._forget()
        mine = sum(owner.key == key.name for owner in self._owners.values())
        if mine >= self._most:
            raise Refused(429, "ServerError", f"the key {key.name!r} has {mine} edits, and may have no more")

    async def install(self, edit: Installed, key: Key) -> None:
        """Have every request run an edit of this key; raises what loading its block does, and `Refused`."""
        self.check(key)
        block = edit.block
        size = len(block.payload) + sum(constant.size for constant in block.constants)
        size += sum(len(vector.data) for vector in {op.vector.digest: op.vector for op in edit.ops}.values())
        self._uploads.take(key.name, size)
        self._owners[edit.number] = Owner(key.name, size)
        self._installing.add(edit.number)
        try:
            await self._model.ainstall(edit)
        finally:
            self._installing.discard(edit.number)
            self._forget()

    async def clear(self, numbers: Iterable[int] | None, key: Key) -> None:
        """End edits, or all of this key's; with the scope `admin` any, or all. `Refused` for those of others."""
        installed = self._engine.edits.installed
        chosen = [edit for edit in installed if numbers is None or edit.number in numbers]
        if not key.may("admin"):
            mine = [edit for edit in chosen if self.owns(key, edit)]
            if numbers is not None and len(mine) < len(chosen):
                raise Refused(403, "PermissionError", "this edit was made with another key, and is ended with that one")
            chosen = mine
        await self._model.uninstall(chosen)
        self._forget()

    def _forget(self) -> None:
        """Let go of what has not been installed after all, or is no more."""
        there = {edit.number for edit in self._engine.edits.installed} | self._installing
        for number in [number for number in self._owners if number not in there]:
            owner = self._owners.pop(number)
            self._uploads.give(owner.key, owner.size)
