"""What Prometheus scrapes is what `model.stats()` says."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from nnsight_async import VLLM
from nnsight_async.engine.metrics import COUNTERS, OUTCOMES, PREFIX
from nnsight_async.testing.engine import drained
from tests.conftest import LONG
from tests.engine.borrowed import borrowed
from tests.engine.rest import at_rest

PROMPT = [5, 17, 101]
SAMPLING: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True}
Samples = dict[tuple[str, str, str], float]


def scrape(registry: CollectorRegistry) -> Samples:
    """By name, model and outcome, through the text that a server of Prometheus would get."""
    return {
        (sample.name, sample.labels["model"], sample.labels.get("outcome", "")): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if sample.name.startswith(PREFIX)
    }


def read_logits(model: Any, tracer: Any) -> None:
    for _ in tracer.iter[:]:
        tracer.save(model.logits, "logits")


def fail(model: Any, tracer: Any) -> None:
    raise ZeroDivisionError


async def test_a_scrape_says_what_stats_says(model: VLLM) -> None:
    registry = CollectorRegistry()
    watched = borrowed(model, metrics=registry, served_model_name="tiny")
    before = await at_rest(model)
    await watched.run(PROMPT, read_logits, **SAMPLING)
    with pytest.raises(ZeroDivisionError):
        await watched.run(PROMPT, fail, **SAMPLING)
    async with watched.run(PROMPT, read_logits, **LONG) as run:
        await anext(run.stream())
    after = await at_rest(model)

    samples = scrape(registry)

    ended = {outcome: samples[f"{PREFIX}runs_total", "tiny", outcome] for outcome in OUTCOMES}
    assert ended == {outcome: after[outcome] for outcome in OUTCOMES}
    assert {outcome: ended[outcome] - before[outcome] for outcome in OUTCOMES} == dict.fromkeys(OUTCOMES, 1)
    for metric, (stat, _) in COUNTERS.items():
        assert samples[f"{PREFIX}{metric}_total", "tiny", ""] == pytest.approx(after[stat]), metric
    assert samples[f"{PREFIX}bytes_total", "tiny", ""] - before["bytes"] > 4 * 512 * 4
    assert samples[f"{PREFIX}up", "tiny", ""] == 1
    assert samples[f"{PREFIX}open_runs", "tiny", ""] == 0
    assert len(samples) == len(OUTCOMES) + len(COUNTERS) + 3


async def test_nothing_is_asked_of_the_engine_but_by_a_scrape(model: VLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = model._engine
    counts, asked = engine.counts, []
    monkeypatch.setattr(engine, "counts", lambda: asked.append(1) or counts())
    registry = CollectorRegistry()
    watched = borrowed(model, metrics=registry)
    await watched.run(PROMPT, read_logits, **SAMPLING)
    assert not asked
    scrape(registry)
    assert asked == [1]


@pytest.mark.usefixtures("unhurried")
def test_a_scrape_does_not_wait_for_a_block(model: VLLM, tmp_path: Path) -> None:
    asyncio.run(drained(model))
    registry = CollectorRegistry()
    watched = borrowed(model, metrics=registry, served_model_name="tiny")
    began, go_on = tmp_path / "began", tmp_path / "go on"

    def wait_for_it(model: Any, tracer: Any) -> None:
        began.touch()
        while not go_on.exists():
            time.sleep(0.01)

    run = watched.run(PROMPT, wait_for_it, max_tokens=1)
    result = run.result  # it starts
    while not began.exists():
        time.sleep(0.01)
    samples = scrape(registry)
    go_on.touch()
    result(60)
    assert samples[f"{PREFIX}open_runs", "tiny", ""] == 1
    assert samples[f"{PREFIX}up", "tiny", ""] == 1


def test_two_models_of_one_registry_have_two_names(llama: str) -> None:
    registry = CollectorRegistry()
    first = VLLM(llama, mode="async", metrics=registry, served_model_name=["a", "b"])
    with pytest.raises(ValueError, match="served_model_name"):
        VLLM(llama, mode="async", metrics=registry, served_model_name="a")
    second = VLLM(llama, mode="async", metrics=registry)
    ups = {("up", "a"): 0, ("up", llama): 0}
    assert {
        (name.removeprefix(PREFIX), model): up for (name, model, _), up in scrape(registry).items() if "_up" in name
    } == ups

    first.close()
    assert {model for _, model, _ in scrape(registry)} == {llama}
    third = VLLM(llama, mode="async", metrics=registry, served_model_name="a")
    assert {model for _, model, _ in scrape(registry)} == {llama, "a"}
    for left in (second, third):
        left.close()
    assert not scrape(registry)


def test_the_default_registry(llama: str) -> None:
    model = VLLM(llama, mode="async", metrics=True)
    assert scrape(REGISTRY)[f"{PREFIX}up", llama, ""] == 0
    model.close()
    assert not scrape(REGISTRY)
