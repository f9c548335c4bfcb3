"""CUDA graphs: which steps replay them, and those that stop where blocks may look (V2 runner, vLLM 0.33)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from nnsight_async.errors import UnsupportedError
from nnsight_async.worker.copies import Copies
from nnsight_async.worker.entries import around, require
from nnsight_async.worker.forms import use_kernels
from nnsight_async.worker.stops import Stops

if TYPE_CHECKING:
    from nnsight_async.interleave.interleaver import Interleaver
    from nnsight_async.interleave.locations import Location

NAMES = (
    "capture_model",
    "cudagraph_manager.dispatch",
    "cudagraph_manager.graphs",
    "cudagraph_manager.pool",
    "cudagraph_manager._capture_descs",
)


class Graphs:
    """Decides for each step whether vLLM's graphs are replayed.

    A step in which no block waits for the forward pass is vLLM's own, compiled and replayed. A step in which one does
    replays graphs of ours that stop at the taps, if these were recorded for its size; otherwise the modules are called
    one by one, not compiled, in the form that their operators have on an engine with `enforce_eager`.
    """

    interleaver: Interleaver
    """Set before the first step."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._looking = False
        """Whether a block looks into the forward pass of this step."""
        self._stopping: dict[Any, Any] = {}
        self._copying: dict[Any, Any] = {}
        self._copies: Copies | None = None
        self._manager = runner.cudagraph_manager
        use_kernels(runner.model, runner.vllm_config)
        around(self._manager, "dispatch", self._dispatch)
        runner.model.register_forward_pre_hook(self._enter)

    @classmethod
    def of(cls, runner: Any) -> Graphs | None:
        """Those of a runner; None if it replays none, and compiles nothing."""
        if runner.vllm_config.model_config.enforce_eager:
            return None
        require(runner, NAMES)
        _refuse(runner)
        return cls(runner)

    @property
    def recorded(self) -> int:
        """For how many sizes of a batch there are graphs that stop at the taps."""
        return len(self._stopping)

    def choose(self) -> None:
        """Blocks have begun the step, and wait for what they want to see in it."""
        self._looking = self.interleaver.looks

    @contextmanager
    def eager(self) -> Generator[None]:
        """Have forward passes call the modules one by one."""
        self._looking = True
        try:
            yield
        finally:
            self._looking = False

    def record(self, taps: Iterable[Location]) -> None:
        """Record graphs of decode steps that stop at `taps`, beside those that vLLM has recorded of the same sizes."""
        taps = tuple(taps)
        self._stopping = self._capture(Stops(self.interleaver, taps))
        if self.interleaver.plans:
            rows = max((shape.num_tokens for shape in self._stopping), default=0)
            self._copies = Copies(self.interleaver, taps, rows)
            self._copying = self._capture(self._copies)
        graphs = self._manager.graphs
        for shape in self._stopping:
            graphs[shape] = _Either(self, shape, graphs[shape])

    def _capture(self, reported: Stops | Copies) -> dict[Any, Any]:
        """Graphs of decode steps by their shapes, in which modules report to that."""
        from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

        found, capture = dict[Any, Any](), CudaGraphManager.capture

        def record(_: Any, forwards: Any, *more: Any) -> None:
            found.update(self._recorded(forwards, reported))

        CudaGraphManager.capture = record  # type: ignore[method-assign]
        try:
            with self.eager(), reported.reported():
                self._runner.capture_model()
        finally:
            CudaGraphManager.capture = capture  # type: ignore[method-assign]
        return found

    def replay(self, shape: Any, plain: Any) -> None:
        """Replay the graph of this shape that the step wants; `plain` is vLLM's."""
        if not self._looking:
            plain.replay()
            return
        self.interleaver.share()
        if self._copies is not None and self._only_reads(self._copies):
            self._copying[shape].replay()
            self._copies.pass_on(shape.num_tokens)
            return
        if not self.interleaver.calls:
            self._stopping[shape].replay()
            return
        from vllm.forward_context import set_forward_context

        with set_forward_context(None, self._runner.vllm_config, num_tokens=shape.num_tokens, skip_compiled=True):
            self._stopping[shape].replay()

    def _only_reads(self, copies: Copies) -> bool:
        """Whether nothing is done in the model's own forward pass of this step but reading what graphs have copied."""
        interleaver = self.interleaver
        return interleaver.only_reads and copies.serves(
            [event for event in interleaver.waiting if not interleaver.order.late(event)]
        )

    def _dispatch(self, dispatch: Callable[..., Any]) -> Callable[..., Any]:
        def entered(requests: int, tokens: int, *args: Any, **kwargs: Any) -> Any:
            shape = dispatch(requests, tokens, *args, **kwargs)
            if not self._looking or shape in self._stopping:
                return shape
            return dataclasses.replace(
                shape,
                cg_mode=type(shape.cg_mode).NONE,
                num_tokens=tokens,
                num_reqs=requests,
                uniform_token_count=None,
                max_query_len=None,
            )

        return entered

    def _enter(self, module: torch.nn.Module, args: object) -> None:
        if self._looking:
            from vllm.forward_context import get_forward_context

            get_forward_context().skip_compiled = True

    @torch.inference_mode()
    def _recorded(self, forwards: Callable[..., Callable[..., None]], reported: Stops | Copies) -> dict[Any, Any]:
        from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture
        from vllm.compilation.cudagraph_pool import capture_pool
        from vllm.config.compilation import CUDAGraphMode
        from vllm.distributed.parallel_state import graph_capture
        from vllm.model_executor.offloader.base import get_offloader

        manager, found = self._manager, dict[Any, Any]()
        with graph_capture(device=manager.device):
            for shape in manager._capture_descs.get(CUDAGraphMode.FULL, ()):
                if shape.num_ubatches > 1:
                    continue
                reported.begin(shape.num_tokens)
                forwards(shape, warmup=True)(CUDAGraphMode.FULL)  # that mode keeps the attention inside of the graphs
                reported.warm()
                forward = forwards(shape, warmup=False)
                get_offloader().sync_prev_onload()
                with (
                    capture_pool(manager.pool, manager.vllm_config) as pool,
                    BreakableCUDAGraphCapture(pool) as capture,
                ):
                    forward(CUDAGraphMode.FULL)
                    get_offloader().join_after_forward()
                found[shape] = capture
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class _Either:
    """What vLLM replays in the place of one of its graphs."""

    graphs: Graphs
    shape: Any
    plain: Any

    def replay(self) -> None:
        self.graphs.replay(self.shape, self.plain)


def _refuse(runner: Any) -> None:
    """`UnsupportedError` for a model that is compiled where blocks cannot have it called module by module."""
    from vllm.config.compilation import CompilationMode

    mode = runner.vllm_config.compilation_config.mode
    if mode not in (CompilationMode.NONE, CompilationMode.VLLM_COMPILE):
        raise UnsupportedError(f"compilation_config mode {mode} compiles blocks away: use 0 or 3")
    if type(runner.model).__call__ is not torch.nn.Module.__call__:
        raise UnsupportedError(f"{type(runner.model).__name__} is compiled as a whole: set enforce_eager=True")
