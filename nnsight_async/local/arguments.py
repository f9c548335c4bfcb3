"""The keywords of `from_pretrained`, which takes any: those that are a slip for another are refused."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SHARED = ("revision", "token", "trust_remote_code", "cache_dir", "local_files_only", "subfolder")
"""Those that configs and tokenizers take too."""

FORMING = ("dtype", "attn_implementation")
"""Those that say what a model is like without its weights."""

OF_WEIGHTS = tuple(
    """
    adapter_kwargs adapter_name allow_all_kernels attn_implementation code_revision config device_map device_mesh
    disable_mmap distributed_config dtype experts_implementation force_download fusion_config generation_config
    gguf_file ignore_mismatched_sizes kernel_config key_mapping max_memory offload_buffers offload_folder
    output_loading_info proxies quantization_config state_dict torch_dtype tp_plan tp_size use_kernels use_safetensors
    variant weights_only
    """.split()  # noqa: SIM905  twenty lines otherwise
)
"""The others (transformers 5.19). Attributes of the config are taken as well."""


def check_arguments(model: Any, given: Mapping[str, Any], own: Iterable[str]) -> None:
    """Raise `TypeError` for a keyword that looks like another one, `own` among them, or has no use."""
    if given and not isinstance(model, str):
        raise TypeError(f"{next(iter(given))}= is for from_pretrained, and this model has been loaded")
    known = [*own, *SHARED, *OF_WEIGHTS]
    for name in given.keys() - set(known):
        near = get_close_matches(name, known, 1, 0.7)
        if near and not _is_of_config(model, name, given):
            raise TypeError(
                f"TransformersModel() got an unexpected keyword argument {name!r}; did you mean {near[0]!r}?"
            )


def shared(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in SHARED if name in given}


def _is_of_config(repo: str, name: str, given: Mapping[str, Any]) -> bool:
    from transformers import AutoConfig

    try:
        return hasattr(AutoConfig.from_pretrained(repo, **shared(given)), name)
    except (OSError, ValueError):  # it will be told of where the model is loaded
        return False
