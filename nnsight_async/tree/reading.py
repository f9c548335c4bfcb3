"""Why some modules of a tree never pass a value that can be read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nnsight_async.interleave.locations import expression

if TYPE_CHECKING:
    from collections.abc import Sequence

CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)
LM_HEAD = "its weights are applied by logits_processor; read model.logits or logits_processor"
NOT_CALLED = "not called in a forward pass"


def unreadable_because(path: str, module: torch.nn.Module, paths: Sequence[str], *, called: bool | None) -> str | None:
    """The reason why `module` cannot be read at `path`, or None if it can.

    `paths` are all paths of the module; `called` says whether a recorded forward pass called it, None if unknown.
    """
    if isinstance(module, CONTAINERS):
        return "a container is not called; read its items"
    if _is_lm_head(path, module, paths) and (not called or path != paths[0]):
        return LM_HEAD
    if path != paths[0]:
        return f"the same module as {expression(paths[0])}; read it there"
    if type(module).__name__ == "PPMissingLayer":
        return "it lives on another pipeline stage"
    return NOT_CALLED if called is False else None


def _is_lm_head(path: str, module: torch.nn.Module, paths: Sequence[str]) -> bool:
    # vLLM 0.32 and 0.33: LogitsProcessor calls `lm_head.quant_method.apply`; ParallelLMHead.forward raises.
    if any(cls.__name__ == "ParallelLMHead" for cls in type(module).__mro__):
        return True
    return len(paths) > 1 and path.rpartition(".")[2] == "lm_head"
