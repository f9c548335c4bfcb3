"""vLLM's own command line and OpenAI-compatible application: all that the server takes of them, by name.

Checked on vLLM 0.32, and on the Python of 0.33. A name that is missing stops the server at its start.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from nnsight_async.errors import UnsupportedError

if TYPE_CHECKING:
    from fastapi import FastAPI
    from vllm.v1.engine.async_llm import AsyncLLM

PLACES = {
    "AsyncEngineArgs": ("vllm.engine.arg_utils",),
    "init_app_state": ("vllm.entrypoints.launchers.api_server.app_state",),
    "build_app": ("vllm.entrypoints.launchers.app",),
    "make_arg_parser": ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args"),
    "validate_parsed_serve_args": ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args"),
    "FlexibleArgumentParser": ("vllm.utils.argparse_utils",),
}
"""Where what is taken stands: in 0.33, and then in 0.32, where that is another module."""

REFUSED = {
    "headless": "the server is one process with one engine",
    "grpc": "the server speaks HTTP",
    "grpc_port": "the server speaks HTTP",
    "uds": "the server listens on a host and a port",
    "api_server_count": "the server is one process",
    "allowed_origins": "pages of other servers are not let in",
}
"""Options of vLLM's server that this one has not, and why."""


def check() -> None:
    """Raise `UnsupportedError` if vLLM has not what the server takes of it."""
    for name in PLACES:
        _found(name)


def _found(name: str) -> Any:
    """What vLLM calls by this name; `UnsupportedError` where it has none."""
    why: list[str] = []
    for module in PLACES[name]:
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            why.append(str(error))
    raise UnsupportedError(f"this vLLM has no {name} ({'; '.join(why)}); the server knows vLLM 0.32 and 0.33")


def parser(program: str, description: str) -> Any:
    """vLLM's parser, with all of its options for a server and an engine."""
    made = _found("make_arg_parser")(_found("FlexibleArgumentParser")(prog=program, description=description))
    made.set_defaults(allowed_origins=[])
    return made


def engine_args(args: Namespace, defaults: Namespace) -> dict[str, Any]:
    """What is asked of the engine: the options that differ from vLLM's defaults."""
    names = [field.name for field in dataclasses.fields(_found("AsyncEngineArgs")) if hasattr(args, field.name)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) != getattr(defaults, name)}
    given.pop("model", None)
    return given


def refused(args: Namespace, defaults: Namespace) -> str | None:
    """What is to be said of an option that this server has not."""
    for name, why in REFUSED.items():
        if getattr(args, name, None) != getattr(defaults, name, None):
            return f"--{name.replace('_', '-')}: {why}"
    return None


def validate(args: Namespace) -> None:
    """vLLM's own look at its options."""
    _found("validate_parsed_serve_args")(args)


def plain_args(repo: str, given: Mapping[str, Any]) -> Namespace:
    """What vLLM's parser gives for a model without further options; `given` are engine arguments."""
    args: Namespace = parser("nnsight-serve", "").parse_args([])
    for name, value in {"model": repo, "disable_log_stats": True, **given}.items():
        setattr(args, name, value)
    return args


async def application(llm: AsyncLLM, args: Namespace) -> FastAPI:
    """vLLM's application for an engine that is there. Call on the engine's loop."""
    args.api_key = None  # ours is the gate
    tasks: Any = await llm.get_supported_tasks()
    app: FastAPI = _found("build_app")(args, tasks, llm.model_config)
    await _found("init_app_state")(llm, app.state, args, tasks)
    return app


def adapters(app: FastAPI) -> dict[str, Any]:
    """The LoRA adapters that the server was started with, by name."""
    models: Any = app.state.openai_serving_models
    return dict(models.lora_requests)
