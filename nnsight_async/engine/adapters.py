"""LoRA adapters as the client of an engine knows them."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from nnsight_async.errors import AdapterError
from nnsight_async.runs import failures

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

NOT_ENABLED = "this engine takes no LoRA adapters; build it with enable_lora=True (and max_lora_rank=...)"


class Adapters:
    """Sees to it that a number and a name each mean one adapter: vLLM (0.32, 0.33) takes what comes first for both.

    It tells adapters apart by number where it loads them, and by name where it picks those of a step.
    """

    def __init__(self, ask: Callable[..., Awaitable[Any]], *, enabled: bool) -> None:
        self._ask = ask
        self._enabled = enabled
        self._checking = threading.Lock()
        self._known: dict[int, tuple[str, str]] = {}

    def check(self, lora: Any) -> None:
        """Raise where `lora` cannot be used: `TypeError`, or `AdapterError` for what is known as something else."""
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
            self._known[lora.lora_int_id] = lora.lora_name, lora.lora_path

    async def add(self, lora: LoRARequest) -> None:
        """Load an adapter ahead of the requests that use it; `AdapterError` if it cannot be."""
        self.check(lora)
        failure: bytes | None = await self._ask("nnsight_load_adapter", msgspec.to_builtins(lora))
        if failure is not None:
            self.forget(lora)
            raise failures.unpack(failure)

    def forget(self, lora: LoRARequest) -> None:
        """It could not be loaded: its number and its name are free again."""
        self._known.pop(lora.lora_int_id, None)

    async def remove(self, number: int) -> bool:
        """Unload an adapter; False if it was not loaded. Its number and its name are free again."""
        if not self._enabled:
            raise AdapterError(NOT_ENABLED)
        self._known.pop(number, None)
        return bool(await self._ask("remove_lora", number))

    async def loaded(self) -> set[int]:
        """The numbers of the adapters that are loaded."""
        return set(await self._ask("list_loras")) if self._enabled else set()

    def _check_known(self, lora: LoRARequest) -> None:
        for number, (name, path) in self._known.items():
            same = (number == lora.lora_int_id, name == lora.lora_name)
            if any(same) and not (all(same) and (path == lora.lora_path or lora.load_inplace)):
                raise AdapterError(
                    f"LoRARequest({lora.lora_name!r}, {lora.lora_int_id}, {lora.lora_path!r}): this engine knows "
                    f"({name!r}, {number}, {path!r}); give each adapter a name and a number of its own, or remove the "
                    "other one first with model.remove_lora(number)"
                )
