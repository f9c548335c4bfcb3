"""The form that vLLM's operators have where nothing is compiled, for single forward passes of a compiled model."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch


def use_kernels(model: torch.nn.Module, config: Any) -> None:
    """Have the operators of a compiled model run kernels of their own wherever they are called one by one.

    A compiled engine has them in plain torch, for the compiler to fuse (`CustomOp.forward_native`, and "native" in the
    priorities of `vllm.ir`; vLLM 0.33). Called one by one, these are many small kernels. What has been compiled calls
    them no more, and everything has been when an engine is warmed up.
    """
    from vllm.model_executor.custom_op import CustomOp

    ops: list[Any] = [module for module in model.modules() if isinstance(module, CustomOp)]
    for op in ops:
        if type(op).forward_cuda is not CustomOp.forward_cuda:
            op._forward_method = op.forward_cuda
    for op, priority in _priorities(config):
        op.set_default(priority)


def _priorities(config: Any) -> list[tuple[Any, list[str]]]:
    """The operators of `vllm.ir` with the priority of their forms on an engine that compiles nothing."""
    from vllm.config.compilation import CompilationMode
    from vllm.ir.op import IrOp
    from vllm.platforms import current_platform

    uncompiled: Any = SimpleNamespace(compilation_config=SimpleNamespace(backend="eager", mode=CompilationMode.NONE))
    priority = current_platform.get_default_ir_op_priority(uncompiled)
    names = [field.name for field in dataclasses.fields(priority)]
    return [(IrOp.registry[name], getattr(priority, name)) for name in names if name in IrOp.registry]
