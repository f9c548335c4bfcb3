"""The order in which one forward pass enters and leaves the modules of a model."""

from __future__ import annotations

import functools
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from nnsight_async.tree.walk import paths_by_module

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    import torch


class Calls(NamedTuple):
    """Where the calls of one module begin and end, as values of a counter that every entry and exit raises by one."""

    entries: tuple[int, ...]
    exits: tuple[int, ...]


class Observe(Protocol):
    """Is shown what passes: the first path of a module, "inputs" or "output", and the value."""

    def __call__(self, path: str, kind: Literal["inputs", "output"], value: Any, /) -> None: ...


def record(model: torch.nn.Module, run: Callable[[], object], observe: Observe | None = None) -> dict[str, Calls]:
    """Call `run`, which is to make one forward pass, and return the calls of every module that it called, by path.

    A module with several paths has all its calls under the first, and under each other path those made by the parent
    in that path. The model is left as it was, also when `run` raises.
    """
    calls = CallOrder(observe)
    with ExitStack() as patches:
        for module, paths in paths_by_module(model):
            patches.enter_context(_watched(module, paths, calls))
        run()
    return calls.by_path()


class CallOrder:
    """Counts entries and exits and knows which modules are running."""

    def __init__(self, observe: Observe | None = None) -> None:
        self._observe = observe
        self._clock = 0
        self._running: list[str] = []
        self._calls: dict[str, list[tuple[int, int]]] = {}

    def call(self, paths: Sequence[str], forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run `forward` of the module with these paths and note when it began and ended."""
        path = self._path_here(paths)
        begin = self._tick()
        self._running.append(path)
        try:
            if self._observe is None:
                return forward(*args, **kwargs)
            self._observe(paths[0], "inputs", (args, kwargs))
            output = forward(*args, **kwargs)
            self._observe(paths[0], "output", output)
            return output
        finally:
            self._running.pop()
            span = (begin, self._tick())
            for noted in {path, paths[0]}:
                self._calls.setdefault(noted, []).append(span)

    def by_path(self) -> dict[str, Calls]:
        """The calls of each module that was called, in the order of their beginning."""
        return {path: Calls(*zip(*sorted(spans), strict=True)) for path, spans in self._calls.items()}

    def _tick(self) -> int:
        self._clock += 1
        return self._clock - 1

    def _path_here(self, paths: Sequence[str]) -> str:
        if len(paths) == 1:
            return paths[0]
        by_parent = {path.rpartition(".")[0]: path for path in reversed(paths)}
        parents = (path for path in reversed(self._running) if path in by_parent)
        return by_parent[next(parents, paths[0].rpartition(".")[0])]


@contextmanager
def _watched(module: torch.nn.Module, paths: Sequence[str], calls: CallOrder) -> Generator[None]:
    # Not hooks: a class under vLLM's @support_torch_compile calls self.forward from its own __call__ (0.32, 0.33), and
    # its hooks never fire. An attribute of the instance is found by every call that goes through `self.forward`.
    own = vars(module).get("forward")
    forward = module.forward

    @functools.wraps(forward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        return calls.call(paths, forward, args, kwargs)

    vars(module)["forward"] = watched
    try:
        yield
    finally:
        if own is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = own
