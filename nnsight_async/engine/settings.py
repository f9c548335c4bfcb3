"""Engine arguments: what is ours, what goes to vLLM, and what we set on it."""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, cast

from nnsight_async.errors import UnsupportedError
from nnsight_async.runs.ops import FORMAT, KEY
from nnsight_async.worker.noise import hush_import

CPU_WORKER = "nnsight_async.worker.cpu.CPUBlockWorker"
FRUGAL_CPU_WORKER = "nnsight_async.worker.cpu.FrugalCPUBlockWorker"
CUDA_WORKER = "nnsight_async.worker.cuda.CUDABlockWorker"

DATA_PARALLEL = (
    "data_parallel_size is not supported: vLLM would spread the requests over several workers, and what blocks save is "
    "taken in from one; build as many models as you want replicas, in this process or in others, and spread the prompts"
)


def is_elsewhere(serve: str | None) -> bool:
    """Whether a model runs on a server: where one is named, and where there is no vLLM to run it here."""
    return bool(serve or os.environ.get("NNSIGHT_SERVE")) or find_spec("vllm") is None


def check_names(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raise `TypeError` for a keyword that is not known, with the nearest one that is."""
    valid = set(known)
    for name in given:
        if name not in valid:
            near = difflib.get_close_matches(name, valid, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{what} got an unexpected keyword argument {name!r}{hint}")


def engine_settings(
    repo: str,
    given: dict[str, Any],
    *,
    tapped: bool = False,
    op_sites: Sequence[str] = (),
    renames: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Arguments for vLLM's `AsyncEngineArgs`: the user's, over our own defaults. `tapped`: blocks look at taps only.

    `op_sites`, and the `renames` that they may use, go along in `additional_config`, which is part of the key under
    which vLLM keeps what it has compiled (0.32, 0.33).

    Raises `TypeError` for an unknown name, and `ValueError` for a value that contradicts what blocks need.
    """
    hush_import()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    fields = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    check_names(given, fields, "VLLM()")
    if "worker_cls" in given:
        raise ValueError("VLLM() sets worker_cls itself: its worker is the one that runs blocks")
    eager = _eager(given, tapped=tapped, sited=bool(op_sites), cpu=current_platform.is_cpu())
    if (given.get("data_parallel_size") or 1) > 1:
        raise UnsupportedError(DATA_PARALLEL)
    tracing = given.get("otlp_traces_endpoint") is not None
    if tracing and given.get("disable_log_stats"):  # vLLM's span needs them, and the engine would end (0.32, 0.33)
        raise ValueError("otlp_traces_endpoint needs vLLM's statistics: leave disable_log_stats out")
    ours = {
        "enforce_eager": eager,
        "enable_chunked_prefill": False,
        "enable_prefix_caching": False,
        "disable_log_stats": not tracing,
        "use_tqdm_on_load": sys.stderr is not None and sys.stderr.isatty(),
        "worker_cls": _cpu_worker(given) if current_platform.is_cpu() else CUDA_WORKER,
    }
    sited = {"additional_config": _with_sites(given, op_sites, renames or {})} if op_sites else {}
    return {"model": repo, **ours, **given, **sited, "enforce_eager": eager}


def _with_sites(given: Mapping[str, Any], op_sites: Sequence[str], renames: Mapping[str, str]) -> dict[str, Any]:
    own: Any = given.get("additional_config") or {}
    if not isinstance(own, dict):
        raise ValueError("op_sites= goes along in additional_config, and the one given is no dict")
    sites = {"op_sites": list(op_sites), "renames": dict(renames), "format": FORMAT}
    return {**cast("dict[str, Any]", own), KEY: sites}


def _eager(given: Mapping[str, Any], *, tapped: bool, sited: bool, cpu: bool) -> bool:
    asked = given.get("enforce_eager")
    if tapped and asked:
        raise ValueError("taps are for engines that replay graphs, and enforce_eager=True replays none: leave one out")
    if asked is False and cpu:
        raise UnsupportedError("enforce_eager=False needs CUDA: there are no graphs on the CPU")
    return cpu or (not (tapped or sited) if asked is None else asked)


def model_name(settings: Mapping[str, Any]) -> str:
    """What logs, metrics and spans call the model: its first `served_model_name`, as vLLM does, or its repository."""
    names = settings.get("served_model_name") or settings["model"]
    return names if isinstance(names, str) else str(names[0])


def _cpu_worker(given: Mapping[str, Any]) -> str:
    sized = any(given.get(name) is not None for name in ("kv_cache_memory_bytes", "gpu_memory_utilization"))
    return CPU_WORKER if sized or os.environ.get("VLLM_CPU_KVCACHE_SPACE") else FRUGAL_CPU_WORKER
