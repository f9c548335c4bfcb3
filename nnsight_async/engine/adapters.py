"""LoRA adapters as the client of an engine knows them."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from nnsight_async.errors import AdapterError
from nnsight_async.runs import failures

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

NOT_ENABLED = "this engine takes no LoRA adapters; build it with enable_lora=True (and max_lora_rank=...)"


class User(Protocol):
    """A request with an adapter."""

    error: BaseException | None

    @property
    def settled(self) -> bool: ...


class Adapters:
    """Sees to it that a number and a name each mean one adapter: vLLM (0.32, 0.33) takes what comes first for both.

    It tells adapters apart by number where it loads them, and by name where it picks those of a step.
    """

    def __init__(self, ask: Callable[..., Awaitable[Any]], *, enabled: bool) -> None:
        self._ask = ask
        self._enabled = enabled
        self._checking = threading.Lock()
        self._known: dict[int, tuple[str, str]] = {}
        self._users: dict[int, dict[int, User]] = {}
        """By the number of the adapter: the requests that use it, by identity."""
        self._left = asyncio.Event()
        self._changes: Counter[str] = Counter()

    def check(self, lora: Any, user: User | None = None) -> None:
        """Raise where `lora` cannot be used: `TypeError`, or `AdapterError` for what is known as something else.

        `user` is a request that uses it from here on, until `let_go`.
        """
        from vllm.lora.request import LoRARequest

        if not isinstance(lora, LoRARequest):
            raise TypeError(
                f"lora_request={lora!r}: vLLM's LoRARequest is expected, such as "
                'vllm.lora.request.LoRARequest("name", 1, "/path/of/the/adapter")'
            )
        if not self._enabled:
            raise AdapterError(NOT_ENABLED)
        with self._checking:
            self._check_known(lora)
            if lora.load_inplace and lora.lora_int_id in self._known:
                self._changes[lora.lora_name] += 1
            self._known[lora.lora_int_id] = lora.lora_name, lora.lora_path
            if user is not None:
                self._users.setdefault(lora.lora_int_id, {})[id(user)] = user

    def changes(self, lora: LoRARequest | None) -> int:
        """How often the name of an adapter has come to mean other weights."""
        return 0 if lora is None else self._changes[lora.lora_name]

    def let_go(self, lora: LoRARequest, user: User) -> None:
        """The request is over, in the engine too. Called on the engine's loop."""
        with self._checking:
            self._users.get(lora.lora_int_id, {}).pop(id(user), None)
        self._left.set()
        if isinstance(user.error, AdapterError):
            self._forget(lora.lora_int_id)

    async def add(self, lora: LoRARequest) -> None:
        """Load an adapter ahead of the requests that use it; `AdapterError` if it cannot be."""
        self.check(lora)
        failure: bytes | None = await self._ask("nnsight_load_adapter", msgspec.to_builtins(lora))
        if failure is not None:
            self._forget(lora.lora_int_id)
            raise failures.unpack(failure)

    async def remove(self, number: int) -> bool:
        """Unload an adapter; False if it was not loaded. Its number and its name are free again.

        `AdapterError` while requests use it: vLLM would go on with the next adapter of that number in their steps.
        """
        if not self._enabled:
            raise AdapterError(NOT_ENABLED)
        while not self._free(number):
            self._left.clear()
            await self._left.wait()
        return bool(await self._ask("remove_lora", number))

    async def loaded(self) -> set[int]:
        """The numbers of the adapters that are loaded."""
        return set(await self._ask("list_loras")) if self._enabled else set()

    def _free(self, number: int) -> bool:
        """Forget an adapter, if requests that have ended have let go of it; `AdapterError` if others use it."""
        with self._checking:
            users = self._users.get(number, {})
            if going := sum(not user.settled for user in users.values()):
                raise AdapterError(
                    f"the LoRA adapter {number} is used by requests that still go ({going}); wait for them, or cancel "
                    "them, before it is removed"
                )
            if not users:
                self._unname(number)
            return not users

    def _forget(self, number: int) -> None:
        """It could not be loaded: its number and its name are free again."""
        with self._checking:
            self._unname(number)

    def _unname(self, number: int) -> None:
        name, _ = self._known.pop(number, (None, None))
        if name is not None:
            self._changes[name] += 1

    def _check_known(self, lora: LoRARequest) -> None:
        for number, (name, path) in self._known.items():
            same = (number == lora.lora_int_id, name == lora.lora_name)
            if any(same) and not (all(same) and (path == lora.lora_path or lora.load_inplace)):
                raise AdapterError(
                    f"LoRARequest({lora.lora_name!r}, {lora.lora_int_id}, {lora.lora_path!r}): this engine knows "
                    f"({name!r}, {number}, {path!r}); give each adapter a name and a number of its own, or remove the "
                    "other one first with model.remove_lora(number)"
                )
