"""CUDA graphs: which steps replay them, and those that stop where blocks may look (V2 runner, vLLM 0.33)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

from nnsight_async.worker.entries import around, require
from nnsight_async.worker.forms import EagerForms

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
        self._recording = False
        self._stopping: dict[Any, Any] = {}
        self._forms = EagerForms(runner.model, runner.vllm_config)
        self._manager = runner.cudagraph_manager
        around(self._manager, "dispatch", self._dispatch)
        runner.model.register_forward_pre_hook(self._enter)
        runner.model.register_forward_hook(self._leave, always_call=True)

    @classmethod
    def of(cls, runner: Any) -> Graphs | None:
        """Those of a runner; None if it replays none, and compiles nothing."""
        if runner.vllm_config.model_config.enforce_eager:
            return None
        require(runner, NAMES)
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
        from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

        capture = CudaGraphManager.capture
        CudaGraphManager.capture = lambda manager, forwards, *_: self._record(forwards)  # type: ignore[method-assign]
        try:
            with self.eager(), self._reporting(list(taps)):
                self._runner.capture_model()
        finally:
            CudaGraphManager.capture = capture  # type: ignore[method-assign]
        graphs = self._manager.graphs
        for shape in self._stopping:
            graphs[shape] = _Either(self, shape, graphs[shape])

    def replay(self, shape: Any, plain: Any) -> None:
        """Replay the graph of this shape that the step wants; `plain` is vLLM's."""
        (self._stopping[shape] if self._looking else plain).replay()

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
            self._forms.use()

    def _leave(self, module: torch.nn.Module, args: object, output: object) -> None:
        self._forms.leave()

    @contextmanager
    def _reporting(self, taps: list[Location]) -> Generator[None]:
        """Have the modules report at `taps` to what is being recorded."""
        listener, sites = self.interleaver, self.interleaver.sites
        self._recording, listener.fire = True, self._stop  # type: ignore[method-assign]
        for tap in taps:
            dict.__setitem__(listener.waiting, tap, [])
            sites.want(tap)
        try:
            yield
        finally:
            for tap in taps:
                dict.__delitem__(listener.waiting, tap)
                sites.release(tap)
            del listener.fire
            self._recording = False

    @torch.inference_mode()
    def _record(self, forwards: Callable[..., Callable[..., None]]) -> None:
        from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture
        from vllm.compilation.cudagraph_pool import capture_pool
        from vllm.config.compilation import CUDAGraphMode
        from vllm.distributed.parallel_state import graph_capture
        from vllm.model_executor.offloader.base import get_offloader

        manager = self._manager
        with graph_capture(device=manager.device):
            for shape in manager._capture_descs.get(CUDAGraphMode.FULL, ()):
                if shape in self._stopping or shape.num_ubatches > 1:
                    continue
                forwards(shape, warmup=True)(CUDAGraphMode.FULL)  # that mode keeps the attention inside of the graphs
                forward = forwards(shape, warmup=False)
                get_offloader().sync_prev_onload()
                with (
                    capture_pool(manager.pool, manager.vllm_config) as pool,
                    BreakableCUDAGraphCapture(pool) as capture,
                ):
                    forward(CUDAGraphMode.FULL)
                    get_offloader().join_after_forward()
                self._stopping[shape] = capture

    def _stop(self, event: Location, value: Any) -> Any:
        """Have the graph that is being recorded stop here; returns what it goes on with.

        That is a copy, because what blocks write must reach no one but whoever takes this value.
        """
        from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture

        capture = BreakableCUDAGraphCapture.current()
        if capture is None:  # a pass that warms up
            return value
        copy = _each(value, torch.clone)
        # The memory is that of the graph, which gives it to others when nobody in the graph needs it any more.
        passing, going_on = _each(value, _weak), _each(copy, _weak)
        capture.add_eager(lambda: self._pass(event, passing, going_on))
        return copy

    def _pass(self, event: Location, value: Any, going_on: Any) -> None:
        if event in self.interleaver.waiting and not self._recording:
            after = self.interleaver.fire(event, value)
            _overwrite(going_on, after, value, also_same=event.at_entry)


@dataclasses.dataclass(frozen=True, slots=True)
class _Either:
    """What vLLM replays in the place of one of its graphs."""

    graphs: Graphs
    shape: Any
    plain: Any

    def replay(self) -> None:
        self.graphs.replay(self.shape, self.plain)


def _weak(tensor: torch.Tensor) -> torch.Tensor:
    from vllm.utils.torch_utils import weak_ref_tensor

    return weak_ref_tensor(tensor)


def _each(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with every tensor in it replaced by what `function` makes of it."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        items = [_each(item, function) for item in cast("list[Any]", value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        return {key: _each(item, function) for key, item in cast("Mapping[Any, Any]", value).items()}
    return value


def _overwrite(target: Any, after: Any, before: Any, *, also_same: bool) -> None:
    """Write the tensors of `after` over those of `target`, which are equal to those of `before`.

    `also_same`: tensors of `before` that are still there may have been written in place.
    """
    if isinstance(target, torch.Tensor):
        if also_same or after is not before:
            target.copy_(after)
    elif isinstance(target, (tuple, list)):
        for index, item in enumerate(cast("list[Any]", target)):
            _overwrite(item, after[index], before[index], also_same=also_same)
    elif isinstance(target, Mapping):
        for key, item in cast("Mapping[Any, Any]", target).items():
            _overwrite(item, after[key], before[key], also_same=also_same)
