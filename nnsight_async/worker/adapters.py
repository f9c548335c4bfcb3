"""LoRA adapters of requests, loaded before vLLM does it: it ends the engine where one cannot be (0.32, 0.33)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from nnsight_async.errors import AdapterError
from nnsight_async.worker.entries import around, require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vllm.lora.request import LoRARequest
    from vllm.v1.core.sched.output import NewRequestData


class Loader(Protocol):
    """The methods of vLLM's worker."""

    def add_lora(self, lora_request: LoRARequest, /) -> Any: ...
    def remove_lora(self, lora_id: int, /) -> Any: ...
    def list_loras(self) -> set[int]: ...


def _alone(failure: str | None) -> Sequence[str | None]:
    return [failure]


class Adapters:
    """Loads what a request needs, and takes it off the request if that fails: vLLM would try again.

    What requests use is kept until they are over. vLLM lets go of the adapter that was used least, be it one of a
    request that goes on, and reads it again in the midst of a step, when its files may be gone.
    """

    def __init__(
        self, loader: Loader, manager: Any = None, agree: Callable[[str | None], Sequence[str | None]] = _alone
    ) -> None:
        """`manager` is vLLM's, if adapters are enabled (`WorkerLoRAManager`, 0.32, 0.33).

        `agree` returns what went wrong on each rank, given what did on this one; all ranks load the same.
        """
        self._loader = loader
        self._agree = agree
        self._loaded: dict[int, Any] = {}
        self._used: dict[str, int] = {}
        """By request, the number of its adapter."""
        if manager is not None:
            require(manager, ["_load_adapter"])
            around(manager, "_load_adapter", self._remembered)

    def provide(self, request: NewRequestData, *, again: bool) -> AdapterError | None:
        """Have the adapter of `request` in the worker; returns why it cannot be. `again`: it has been there already."""
        lora = request.lora_request
        if lora is None:
            return None
        try:
            if not again:
                self.load(lora)
        except AdapterError as error:
            request.lora_request = None
            return error
        self._used[request.req_id] = lora.lora_int_id
        if lora.load_inplace:  # once is enough
            request.lora_request = msgspec.structs.replace(lora, load_inplace=False)
        return None

    def part(self, requests: Iterable[str]) -> None:
        """These requests are over."""
        if self._used:
            for request in requests:
                self._used.pop(request, None)
            needed = {*self._used.values(), *self._loader.list_loras()}
            self._loaded = {number: model for number, model in self._loaded.items() if number in needed}

    def load(self, lora: LoRARequest) -> None:
        """Load an adapter that is not there yet; `AdapterError` says why it cannot be."""
        if not lora.load_inplace and lora.lora_int_id in self._loader.list_loras():
            return
        cause: Exception | None = None
        try:
            self._loader.add_lora(lora)
        except Exception as error:
            cause = error
        failures = [failure for failure in self._agree(None if cause is None else str(cause)) if failure is not None]
        if failures:
            if cause is None:  # all have it, or none
                self._loader.remove_lora(lora.lora_int_id)
            what = f"the LoRA adapter {lora.lora_name!r} at {lora.lora_path}"
            raise AdapterError(f"{what} cannot be loaded: {failures[0]}") from cause

    def _remembered(self, load: Callable[[LoRARequest], Any]) -> Callable[[LoRARequest], Any]:
        def entered(lora: LoRARequest) -> Any:
            try:
                model = load(lora)
            except Exception:
                if lora.load_inplace or lora.lora_int_id not in self._used.values():
                    raise
                return self._loaded[lora.lora_int_id]
            self._loaded[lora.lora_int_id] = model
            return model

        return entered
