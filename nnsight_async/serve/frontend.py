"""vLLM's own command line and OpenAI-compatible application: all that the server takes of them, by name.

Checked on vLLM 0.32 and written for 0.33. A name that is missing stops the server at its start.
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

NAMES = {
    "vllm.engine.arg_utils": ("AsyncEngineArgs",),
    "vllm.entrypoints.launchers.api_server.app_state": ("init_app_state",),
    "vllm.entrypoints.launchers.app": ("build_app",),
    "vllm.entrypoints.launchers.cli_args": ("make_arg_parser", "validate_parsed_serve_args"),
    "vllm.utils.argparse_utils": ("FlexibleArgumentParser",),
}

REFUSED = {
    "headless": "the server is one process with one engine",
    "grpc": "the server speaks HTTP",
    "uds": "the server listens on a host and a port",
    "api_server_count": "the server is one process",
    "allowed_origins": "pages of other servers are not let in",
}
"""Options of vLLM's server that this one has not, and why."""


def check() -> None:
    """Raise `UnsupportedError` if vLLM has not what the server takes of it."""
    missing: list[str] = []
    for module, names in NAMES.items():
        try:
            found = import_module(module)
        except ImportError:
            missing.append(module)
            continue
        missing += [f"{module}.{name}" for name in names if not hasattr(found, name)]
    if missing:
        raise UnsupportedError(f"this vLLM has not {', '.join(missing)}; the server knows vLLM 0.32 and 0.33")


def parser(program: str, description: str) -> Any:
    """vLLM's parser, with all of its options for a server and an engine."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    made: Any = make_arg_parser(FlexibleArgumentParser(prog=program, description=description))
    made.set_defaults(allowed_origins=[])
    return made


def engine_args(args: Namespace, defaults: Namespace) -> dict[str, Any]:
    """What is asked of the engine: the options that differ from vLLM's defaults."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    names = [field.name for field in dataclasses.fields(AsyncEngineArgs) if hasattr(args, field.name)]
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
    from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args

    validate_parsed_serve_args(args)


def plain_args(repo: str, given: Mapping[str, Any]) -> Namespace:
    """What vLLM's parser gives for a model without further options; `given` are engine arguments."""
    args: Namespace = parser("nnsight-serve", "").parse_args([])
    for name, value in {"model": repo, "disable_log_stats": True, **given}.items():
        setattr(args, name, value)
    return args


async def application(llm: AsyncLLM, args: Namespace) -> FastAPI:
    """vLLM's application for an engine that is there. Call on the engine's loop."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app

    args.api_key = None  # ours is the gate
    tasks: Any = await llm.get_supported_tasks()
    app = build_app(args, tasks, llm.model_config)
    await init_app_state(llm, app.state, args, tasks)
    return app


def adapters(app: FastAPI) -> dict[str, Any]:
    """The LoRA adapters that the server was started with, by name."""
    models: Any = app.state.openai_serving_models
    return dict(models.lora_requests)
