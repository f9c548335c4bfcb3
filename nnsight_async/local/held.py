"""A model when it is needed: its tree first, its weights with the first run."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nnsight_async.errors import EngineClosedError
from nnsight_async.local.engine import CLOSED, LocalEngine, RunLimits
from nnsight_async.local.loading import given, hollow, load, skeleton
from nnsight_async.tree.envoy import Envoy

if TYPE_CHECKING:
    from nnsight_async.local.loading import Loaded


class Held:
    """What was asked for, and what has been made of it so far. Any thread may ask."""

    def __init__(
        self, model: Any, arguments: Mapping[str, Any], device: Any, tokenizer: Any, renames: Any, limits: RunLimits
    ) -> None:
        self._given = None if isinstance(model, str) else model
        self.name = model if isinstance(model, str) else str(model.config.name_or_path or type(model).__name__)
        self._arguments = arguments
        self._device = device
        self._tokenizer = tokenizer
        self._renames: dict[str, str] = dict(renames or {})
        self._limits = limits
        self.engine: LocalEngine | None = None
        self.closed = False
        self._hollow: Loaded | None = None
        self._root: Envoy | None = None
        self._making = threading.RLock()

    @property
    def root(self) -> Envoy:
        """The root of the tree, which is made of the config where there are no weights yet."""
        with self._making:
            if self._root is None:
                self._root = Envoy(self.loaded.manifest().renamed(self._renames))
            return self._root

    @property
    def owners(self) -> tuple[object, ...]:
        """What the modules of the tree belong to."""
        return () if self._root is None else (self._root.__block_owner__,)

    @property
    def loaded(self) -> Loaded:
        """The model with its weights, if it has them by now."""
        with self._making:
            if self.engine is not None:
                return self.engine.loaded
            if self._given is not None:
                return given(self._given, self.name, self._tokenizer)
            if self._hollow is None:
                self._hollow = skeleton(self.name, self._arguments)
            return self._hollow

    def build(self) -> LocalEngine:
        """The engine, with the weights; raises `EngineClosedError` after `close`."""
        if self.engine is None or self.closed:
            with self._making:
                if self.closed:
                    raise EngineClosedError(CLOSED)
                if self.engine is None:
                    engine = self._engine_on(self._load())
                    self._root = self._root or Envoy(engine.manifest)
                    self.engine = engine
        return self.engine

    def build_hollow(self) -> LocalEngine:
        """An engine on a model without weights."""
        if self._given is not None:
            return self._engine_on(hollow(type(self._given), self._given.config, self.name, self._tokenizer))
        with self._making:
            if self._hollow is None:
                self._hollow = skeleton(self.name, self._arguments)
        return self._engine_on(self._hollow)

    def close(self) -> None:
        """End the engine."""
        with self._making:
            self.closed = True
            if self.engine is not None:
                self.engine.close()

    def _engine_on(self, loaded: Loaded) -> LocalEngine:
        engine = LocalEngine(loaded, loaded.manifest().renamed(self._renames), self._limits)
        weakref.finalize(self, engine.close)
        return engine

    def _load(self) -> Loaded:
        if self._given is None:
            return load(self.name, self._arguments, self._device)
        model = self._given if self._device is None else self._given.to(self._device)
        return given(model, self.name, self._tokenizer)
