"""Entering modules: while some block waits at or below a module, its `forward` reports entry and exit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from nnsight_async.interleave.inside import Inside, Listener
from nnsight_async.interleave.locations import OUTSIDE, Location


class Change(Protocol):
    """Changes what a module returns, in place and before anybody is told of it."""

    reported: bool
    """Whether the module has a reporting `forward`, which calls this."""

    def __call__(self, output: Any) -> None: ...


class Sites:
    """Puts a reporting `forward` on a module while it is needed, and takes it away after.

    An attribute of the instance is used, not a torch hook: classes under vLLM's `support_torch_compile` bypass their
    hooks even in eager mode (vLLM 0.32, 0.33), and a hook added while its module runs is not seen any more.
    Ancestors are entered too, because a block that waits inside a module may next ask for that module's own output. A
    module with several paths, such as a rotary embedding that all layers share, has ancestors on each of them.
    """

    def __init__(self, root: torch.nn.Module, listener: Listener) -> None:
        self._modules = dict(root.named_modules(remove_duplicate=False))
        self._others = _others(self._modules)
        self._listener = listener
        self.inside = Inside(listener)
        self._reached: set[str] = set()
        """Modules that have been entered with all that is around them, since others were left last."""
        self._held: set[str] = set()
        self._stays = False
        self._chains: dict[str, tuple[str, ...]] = {}
        self._previous: dict[str, Any] = {}
        self._reporting: dict[str, Callable[..., Any]] = {}
        self._own: dict[str, Callable[..., Any]] = {}
        self.changes: Mapping[str, Change] = {}
        """By module: what is done to its output in every pass in which it reports."""
        self.reports = 0
        """How often a module's reporting `forward` has run."""

    @property
    def entered(self) -> int:
        """How many modules carry a reporting `forward` now."""
        return len(self._previous)

    def module(self, path: str) -> torch.nn.Module | None:
        return self._modules.get(path)

    def lodge(self, modules: Mapping[str, torch.nn.Module]) -> None:
        """Have these be the modules by path: those that are here, under the paths of the whole model."""
        self._modules = dict(modules)
        self._others = _others(self._modules)

    def want(self, event: Location) -> None:
        """Someone waits at `event`: enter its module and the ancestors."""
        path, kind, operation = event
        if operation:
            self.inside.want(event)
        if path not in self._reached and kind not in OUTSIDE:
            self._reach(path)

    def hold(self, path: str) -> None:
        """Enter a module and its ancestors until `let_go`, whoever waits there."""
        self._held.add(path)
        self._reach(path)

    def let_go(self, path: str) -> None:
        """End what `hold` began."""
        self._held.discard(path)
        if not self._stays:
            self.settle()

    def _reach(self, path: str) -> None:
        self._reached.add(path)
        for link in self._chains.get(path) or self._chain(path):
            if link not in self._previous:
                self._enter(link)

    def release(self, event: Location) -> None:
        """Nobody waits at `event` any more."""
        if event.operation:
            self.inside.release(event)
        if not self._stays:
            self.settle()

    def stay(self) -> None:
        """Leave no module until `settle`: who waited at one will wait at another, mostly below the same ancestors."""
        self._stays = True

    def settle(self) -> None:
        """Leave the modules that nobody wants any more."""
        self._stays = False
        self._reached = {*self._held, *(event.path for event in self._listener.waiting if event.in_model)}
        needed = {link for path in self._reached for link in self._chain(path)}
        for link in [link for link in self._previous if link not in needed]:
            self._leave(link)

    def watch(self, event: Location) -> None:
        """A block that uses `.source` waits at `event`, and may next ask for operations of what runs meanwhile."""
        for link in self._chain(event.path):
            self.inside.watch(link)

    def rest(self, event: Location) -> None:
        """A block that uses `.source` does not wait at `event` any more."""
        for link in self._chain(event.path):
            self.inside.rest(link)

    def check(self, event: Location) -> None:
        """Raise `UnreadableError` or `LocationError` for an operation that cannot come."""
        self.inside.check(event, self._inner(event.path))

    def _chain(self, path: str) -> tuple[str, ...]:
        chain = self._chains.get(path)
        if chain is None:
            above = [link for other in self._others.get(path, ()) for link in _prefixes(other)[:-1]]
            repeated = {other for others in self._others.values() for other in others}
            chain = tuple(dict.fromkeys([*_prefixes(path), *(link for link in above if link not in repeated)]))
            self._chains[path] = chain
        return chain

    def _enter(self, path: str) -> None:
        own = self._modules[path].__dict__
        self._previous[path] = own.get("forward")
        own["forward"] = self._reporting.get(path) or self._report(path)
        if path in self.changes:
            self.changes[path].reported = True

    def _leave(self, path: str) -> None:
        own, previous = self._modules[path].__dict__, self._previous.pop(path)
        if path in self.changes:
            self.changes[path].reported = False
        if previous is None:
            del own["forward"]
        else:
            own["forward"] = previous

    def _report(self, path: str) -> Callable[..., Any]:
        reporting = self._reporting[path] = self._make(path)
        return reporting

    def _inner(self, path: str) -> Callable[..., Any]:
        """The forward that the module has of its own, which is asked for before it is entered the first time."""
        inner = self._own.get(path)
        if inner is None:
            inner = self._own[path] = self._modules[path].forward
        return inner

    def _make(self, path: str) -> Callable[..., Any]:
        listener, inside, inner = self._listener, self.inside, self._inner(path)
        entry, exit_ = Location(path, "inputs"), Location(path, "output")

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.reports += 1
            if entry in listener.waiting:
                args, kwargs = listener.fire(entry, (args, kwargs))
            output = (inside.forward(path, inner) if inside.watched else inner)(*args, **kwargs)
            if path in self.changes and not listener.running:
                self.changes[path](output)
            if exit_ in listener.waiting:
                output = listener.fire(exit_, output)
            return output

        return forward


def _prefixes(path: str) -> list[str]:
    """The path and those of the modules around it, the root first."""
    parts = path.split(".") if path else []
    return [".".join(parts[:length]) for length in range(len(parts) + 1)]


def _others(modules: Mapping[str, torch.nn.Module]) -> dict[str, list[str]]:
    """By the first path of a module, its other paths."""
    first: dict[int, str] = {}
    others: dict[str, list[str]] = {}
    for path, module in modules.items():
        known = first.setdefault(id(module), path)
        if known != path:
            others.setdefault(known, []).append(path)
    return others
