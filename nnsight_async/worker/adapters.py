"""LoRA adapters of requests, loaded before vLLM does it: it ends the engine where one cannot be (0.32, 0.33)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from nnsight_async.errors import AdapterError

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.sched.output import NewRequestData


class Loader(Protocol):
    """The methods of vLLM's worker."""

    def add_lora(self, lora_request: LoRARequest, /) -> Any: ...
    def list_loras(self) -> set[int]: ...


class Adapters:
    """Loads what a request needs, and takes it off the request if that fails: vLLM would try again."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def provide(self, request: NewRequestData) -> AdapterError | None:
        """Have the adapter of `request` in the worker; returns why it cannot be."""
        lora = request.lora_request
        if lora is None:
            return None
        try:
            self.load(lora)
        except AdapterError as error:
            request.lora_request = None
            return error
        if lora.load_inplace:  # once is enough
            request.lora_request = msgspec.structs.replace(lora, load_inplace=False)
        return None

    def load(self, lora: LoRARequest) -> None:
        """Load an adapter that is not there yet; `AdapterError` says why it cannot be."""
        try:
            if lora.load_inplace or lora.lora_int_id not in self._loader.list_loras():
                self._loader.add_lora(lora)
        except Exception as error:
            raise AdapterError(
                f"the LoRA adapter {lora.lora_name!r} at {lora.lora_path} cannot be loaded: {error}"
            ) from error
