"""Prometheus metrics of models, read when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

PREFIX = "nnsight_async_"

OUTCOMES = ("finished", "failed", "cancelled")

COUNTERS = {
    "aborts": ("aborted", "Runs that vLLM was told to end before their last token."),
    "steps": ("steps", "Forward passes that had a block."),
    "block_seconds": ("block_seconds", "Seconds that blocks took of the worker's thread."),
    "strikes": ("strikes", "Interruptions of blocks that ran on past block_timeout."),
    "replays": ("replays", "Preempted runs whose edits were repeated."),
    "messages": ("messages", "Messages of saved values that have come from the worker."),
    "frames": ("frames", "Parts of those messages, each of one run."),
    "bytes": ("bytes", "Bytes in those messages."),
    "late_frames": ("late_frames", "Frames that came for runs that had ended, and were dropped."),
    "damaged_messages": ("damaged", "Messages that could not be read, and were dropped."),
}
"""Names without prefix, and which of the model's stats each is."""

GAUGES = {
    "up": ("up", "Whether the engine is there: 0 before it is built, and when its processes have ended."),
    "open_runs": ("client_runs", "Runs that go now, with and without a block."),
    "open_blocks": ("runs", "Blocks in the worker."),
}


class Source(Protocol):
    """What metrics are of: a model."""

    def reading(self) -> dict[str, Any] | None: ...


class ModelCollector:
    """The metrics of all models of one registry. A model that is closed, or that nobody holds, has none."""

    def __init__(self) -> None:
        self._models: WeakValueDictionary[str, Source] = WeakValueDictionary()

    def add(self, name: str, model: Source) -> None:
        """Have `model` among them, under a name that no other has."""
        known = self._models.get(name)
        if known is not None and known.reading() is not None:
            raise ValueError(
                f"the registry has metrics of a model {name!r} already: give this one another name by "
                "served_model_name=, or close the other"
            )
        self._models[name] = model

    def describe(self) -> list[Metric]:
        """Nothing: it is what a registry would ask for at registration, and would have to be asked of the engines."""
        return []

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        found = {name: model.reading() for name, model in sorted(self._models.items())}
        read = {name: counts for name, counts in found.items() if counts is not None}
        runs = CounterMetricFamily(f"{PREFIX}runs", "Runs that have ended.", labels=["model", "outcome"])
        for name, counts in read.items():
            for outcome in OUTCOMES:
                runs.add_metric([name, outcome], counts.get(outcome, 0))
        yield runs
        for kind, table in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
            for metric, (stat, what) in table.items():
                yield _filled(kind(f"{PREFIX}{metric}", what, labels=["model"]), stat, read)


_collectors: WeakKeyDictionary[CollectorRegistry, ModelCollector] = WeakKeyDictionary()
_lock = Lock()


def register(model: Source, name: str, registry: CollectorRegistry | bool) -> None:
    """Have the metrics of `model` in a registry, or with True in the default one; `ValueError` for a name it has."""
    if registry is not False:
        _collector(None if registry is True else registry).add(name, model)


def _collector(registry: CollectorRegistry | None) -> ModelCollector:
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        raise ImportError("metrics need the package prometheus-client: pip install prometheus-client") from None

    registry = registry or REGISTRY
    with _lock:
        collector = _collectors.get(registry)
        if collector is None:
            collector = _collectors[registry] = ModelCollector()
            registry.register(collector)  # type: ignore[arg-type]
    return collector


def _filled(family: Any, stat: str, read: Mapping[str, Mapping[str, Any]]) -> Metric:
    for name, counts in read.items():
        family.add_metric([name], counts.get(stat, 0))
    return family
