"""The form that vLLM's operators have where nothing is compiled, for single forward passes of a compiled model."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch


class EagerForms:
    """Swaps the operators of a model between the forms that are compiled and those with kernels of their own.

    A compiled engine has operators in plain torch, for the compiler to fuse (`CustomOp.forward_native`, and "native" in
    the priorities of `vllm.ir`; vLLM 0.33). Called one by one, these are many small kernels.
    """

    def __init__(self, model: torch.nn.Module, config: Any) -> None:
        self._forms = [(op, op._forward_method, op.forward_cuda) for op in _compiled(model)]
        self._priorities = _priorities(config)
        self._restored = ExitStack()
        self.used = False

    def use(self) -> None:
        """Have the operators run their own kernels."""
        if self.used:
            return
        self.used = True
        for op, _, eager in self._forms:
            op.__dict__["_forward_method"] = eager
        for op, priority in self._priorities:
            self._restored.enter_context(op.set_priority(priority))

    def leave(self) -> None:
        """Have them as they are compiled."""
        if not self.used:
            return
        self.used = False
        for op, compiled, _ in self._forms:
            op.__dict__["_forward_method"] = compiled
        self._restored.close()


def _compiled(model: torch.nn.Module) -> list[Any]:
    """The operators that run in plain torch, and have a kernel."""
    from vllm.model_executor.custom_op import CustomOp

    ops: list[Any] = [module for module in model.modules() if isinstance(module, CustomOp)]
    return [op for op in ops if op._forward_method == op.forward_native and type(op).forward_cuda is not _missing()]


def _missing() -> Any:
    from vllm.model_executor.custom_op import CustomOp

    return CustomOp.forward_cuda


def _priorities(config: Any) -> list[tuple[Any, list[str]]]:
    """The operators of `vllm.ir` with the priority of their forms on an engine that compiles nothing."""
    from vllm.config.compilation import CompilationMode
    from vllm.ir.op import IrOp
    from vllm.platforms import current_platform

    if config.compilation_config.mode == CompilationMode.NONE:
        return []
    uncompiled: Any = SimpleNamespace(compilation_config=SimpleNamespace(backend="eager", mode=CompilationMode.NONE))
    priority = current_platform.get_default_ir_op_priority(uncompiled)
    names = [field.name for field in dataclasses.fields(priority)]
    return [(IrOp.registry[name], getattr(priority, name)) for name in names if name in IrOp.registry]
