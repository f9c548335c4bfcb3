"""Engines for the tests that define the language of blocks.

One engine at a time: fixtures are session-scoped and pytest groups the tests by parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from nnsight_async import VLLM, TransformersModel
from nnsight_async.serve.server import Server
from nnsight_async.testing import hf_model, tiny_checkpoint
from nnsight_async.testing.engine import tiny_engine_args

BACKENDS = ("vllm", "transformers", "served")
"""What the language is defined on: for each, there is a session fixture `NAME_model`. Tests of what only some of them
have are marked `backends("vllm", ...)`."""

ARCHITECTURES = ("llama", "qwen3", "gpt2", "qwen3_moe")


def build(name: str, **more: Any) -> VLLM:
    """An engine on a tiny checkpoint, of mode "async", which also serves plain `with` where no loop runs."""
    return VLLM(tiny_checkpoint(name), mode="async", dispatch=True, **{**tiny_engine_args(), **more})


SLOW = ("served",)
"""Backends on which the suite is run by who asks for it: they have the language of another, from further away."""

PARAMETERS = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in BACKENDS]


@pytest.fixture(scope="session")
def served_model(vllm_model: VLLM) -> Iterator[VLLM]:
    """A client of a server that takes blocks of Python, on the engine that all tests share."""
    with Server(vllm_model, allow_python=True) as server:
        client = VLLM(vllm_model.repo, mode="async", serve=server.url)
        yield client
        client.close()


@pytest.fixture(scope="session", params=PARAMETERS)
def model(request: pytest.FixtureRequest) -> Any:
    """The tiny Llama on a backend."""
    return request.getfixturevalue(f"{request.param}_model")


OWN_CLASSES = "exceptions of a user's own classes, and groups, come as BlockError: nothing of a server's is unpickled"
LATER = "values of sampling parameters are looked at by the server, and what it says comes where the run is waited for"
ADAPTERS = "an adapter is named, and is one that the server was started with"

SERVED_HAS_NOT = {
    "test_a_fault_ends_its_own_run[served-own type]": OWN_CLASSES,
    "test_a_fault_ends_its_own_run[served-awkward arguments]": OWN_CLASSES,
    "test_a_fault_ends_its_own_run[served-message that raises]": OWN_CLASSES,
    "test_a_fault_ends_its_own_run[served-cause]": OWN_CLASSES,
    "test_a_fault_ends_its_own_run[served-group]": OWN_CLASSES,
    "test_a_fault_ends_its_own_run[served-errors that are caught]": OWN_CLASSES,
    "test_a_fault_in_sync_form[served-own type]": OWN_CLASSES,
    "test_a_fault_in_sync_form[served-awkward arguments]": OWN_CLASSES,
    "test_a_fault_in_sync_form[served-message that raises]": OWN_CLASSES,
    "test_a_fault_in_sync_form[served-cause]": OWN_CLASSES,
    "test_a_fault_in_sync_form[served-group]": OWN_CLASSES,
    "test_a_fault_in_sync_form[served-errors that are caught]": OWN_CLASSES,
    "test_it_surfaces_wherever_the_run_is_waited_for[served]": OWN_CLASSES,
    "test_an_error_that_nobody_asks_for_is_logged_once[served]": OWN_CLASSES,
    "test_an_error_of_one_invoke_that_nobody_asks_for_is_logged_once[served]": OWN_CLASSES,
    "test_an_error_that_is_asked_for_late_is_not_logged[served]": OWN_CLASSES,
    "test_the_traceback_ends_at_the_users_line[served]": OWN_CLASSES,
    "test_the_traceback_goes_through_functions_of_the_user[served]": OWN_CLASSES,
    "test_what_an_exception_carries[served]": OWN_CLASSES,
    "test_the_callers_class_is_left_alone[served]": OWN_CLASSES,
    "test_bad_settings_are_told_at_the_trace_and_at_the_invoke[served]": LATER,
    "test_bad_sampling_values_get_the_message_of_vllm[served-temperature]": LATER,
    "test_bad_sampling_values_get_the_message_of_vllm[served-top_p]": LATER,
    "test_bad_sampling_values_get_the_message_of_vllm[served-max_tokens]": LATER,
    "test_values_of_a_wrong_type_do_not_reach_the_engine[served]": LATER,
    "test_none_as_adapter_of_an_invoke_means_the_base_model[served]": ADAPTERS,
}
"""What cannot be the same through a server, and why."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of what a backend has not."""
    left_out = [item for item in items if not _is_for_its_backend(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _is_for_its_backend(item: pytest.Item) -> bool:
    marker, call = item.get_closest_marker("backends"), getattr(item, "callspec", None)
    backend = None if call is None else call.params.get("model") or call.params.get("pair", (None,))[0]
    if backend == "served" and item.name in SERVED_HAS_NOT:
        return False
    return marker is None or backend is None or backend in marker.args


@pytest.fixture(scope="session")
def hf() -> Any:
    """The same Llama in transformers."""
    return hf_model("llama")


@dataclass
class Pair:
    """One architecture on a backend and in transformers, and what its parts are called in either."""

    name: str
    model: Any
    hf: Any

    @property
    def sums(self) -> bool:
        """Whether a layer returns the stream in two parts."""
        return isinstance(self.model, VLLM) and self.name != "gpt2"

    @property
    def layers(self) -> Any:
        """The decoder layers on the engine: paths that blocks can use."""
        return self.model.transformer.h if self.name == "gpt2" else self.model.model.layers

    @property
    def hf_layers(self) -> Any:
        return self.hf.transformer.h if self.name == "gpt2" else self.hf.model.layers

    def stream(self, output: Any) -> torch.Tensor:
        """The residual stream after a layer of the engine, from that layer's output."""
        return output if isinstance(output, torch.Tensor) else output[0] + output[1]


@pytest.fixture(
    scope="session",
    params=[(backend, name) for backend in BACKENDS if backend not in SLOW for name in ARCHITECTURES],
    ids="-".join,
)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    backend, name = request.param
    if name == "llama":
        yield Pair(name, request.getfixturevalue(f"{backend}_model"), hf_model(name))
        return
    model = build(name) if backend == "vllm" else TransformersModel(tiny_checkpoint(name), mode="async")
    yield Pair(name, model, hf_model(name))
    model.close()
