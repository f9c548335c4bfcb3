"""Many runs of every kind at once, of which some fail, some are left, some are slow: the others notice nothing."""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight_async.testing import hf_model, v2_runner_environment
from nnsight_async.testing.engine import drained
from nnsight_async.testing.oracle import generation

ROOT = Path(__file__).parents[2]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
AT_ONCE = 64


@dataclass(frozen=True)
class Task:
    """One run: what it is asked, and the vector that its block adds after layer 1 (times 0: it only reads)."""

    prompt: tuple[int, ...]
    steps: int
    scale: float
    seed: int

    @property
    def vector(self) -> torch.Tensor:
        return self.scale * torch.randn(128, generator=torch.Generator().manual_seed(self.seed))

    @property
    def sampling(self) -> dict[str, Any]:
        return {"max_tokens": self.steps, "temperature": 0.0, "ignore_eos": True}


def probe(task: Task, fails_at: int | None = None) -> Callable[[Any, Any], None]:
    vector, edits = task.vector, task.scale != 0

    def block(model: Any, tracer: Any) -> None:
        for step in tracer.iter[:]:
            if edits:
                model.model.layers[1].output[0][:] += vector
            tracer.save(model.model.layers[2].resid_post[-1], "stream")
            if step == fails_at:
                raise ValueError(f"at step {step}")

    return block


class Oracle:
    """The same generation in transformers, each computed once."""

    def __init__(self) -> None:
        self._hf = hf_model("llama")
        self._known: dict[Task, tuple[list[int], torch.Tensor]] = {}

    def __call__(self, task: Task) -> tuple[list[int], torch.Tensor]:
        if task not in self._known:
            edit = {1: lambda hidden: hidden + task.vector} if task.scale else {}
            found = generation(self._hf, list(task.prompt), task.steps, edit)
            self._known[task] = found.ids, found.streams[2][len(task.prompt) - 1 :]
        return self._known[task]


async def check(task: Task, oracle: Oracle, tokens: list[Any]) -> None:
    ids, streams = oracle(task)
    assert [token.id for token in tokens] == ids[: len(tokens)]
    torch.testing.assert_close(
        torch.stack([token.saves["stream"] for token in tokens]), streams[: len(tokens)], **CLOSE
    )


async def whole(model: Any, task: Task, oracle: Oracle, draw: random.Random) -> None:
    async with model.run(list(task.prompt), probe(task), **task.sampling) as run:
        tokens = [token async for token in run.stream()]
    assert len(tokens) == task.steps
    await check(task, oracle, tokens)


async def slow(model: Any, task: Task, oracle: Oracle, draw: random.Random) -> None:
    tokens = []
    async with model.run(list(task.prompt), probe(task), **task.sampling) as run:
        async for token in run.stream():
            tokens.append(token)
            await asyncio.sleep(draw.random() / 20)
    assert len(tokens) == task.steps
    await check(task, oracle, tokens)


async def plain(model: Any, task: Task, oracle: Oracle, draw: random.Random) -> None:
    (output,) = await model.generate(list(task.prompt), **task.sampling)
    assert list(output.outputs[0].token_ids) == oracle(Task(task.prompt, task.steps, 0.0, 0))[0]


async def failing(model: Any, task: Task, oracle: Oracle, draw: random.Random) -> None:
    at = draw.randrange(task.steps)
    tokens = []
    with pytest.raises(ValueError, match=f"at step {at}"):  # noqa: PT012
        async with model.run(list(task.prompt), probe(task, at), **task.sampling) as run:
            async for token in run.stream():
                tokens.append(token)  # noqa: PERF401  those before the error are wanted
    assert len(tokens) == at
    if tokens:
        await check(task, oracle, tokens)


async def left(model: Any, task: Task, oracle: Oracle, draw: random.Random) -> None:
    tokens, most = [], draw.randint(1, task.steps)
    async with model.run(list(task.prompt), probe(task), **task.sampling) as run:
        async for token in run.stream():
            tokens.append(token)
            if len(tokens) == most:
                break
    await check(task, oracle, tokens)


async def cancelled(model: Any, task: Task, oracle: Oracle, draw: random.Random) -> None:
    async def follow() -> None:
        async with model.run(list(task.prompt), probe(task), **task.sampling) as run:
            await run.result

    following = asyncio.create_task(follow())
    await asyncio.sleep(draw.random() / 10)
    following.cancel()
    await asyncio.wait([following])


async def timed(model: Any, task: Task, oracle: Oracle, draw: random.Random) -> None:
    tokens = []
    try:
        async with (
            asyncio.timeout(draw.random() / 5),
            model.run(list(task.prompt), probe(task), **task.sampling) as run,
        ):
            async for token in run.stream():
                tokens.append(token)  # noqa: PERF401
    except TimeoutError:
        pass
    if tokens:
        await check(task, oracle, tokens)


async def raising(model: Any, task: Task, oracle: Oracle, draw: random.Random) -> None:
    with pytest.raises(KeyError):  # noqa: PT012
        async with model.run(list(task.prompt), probe(task), **task.sampling) as run:
            async for token in run.stream():
                raise KeyError(token.index)


KINDS: list[Callable[[Any, Task, Oracle, random.Random], Awaitable[None]]] = [
    whole, whole, slow, plain, failing, left, cancelled, timed, raising,
]  # fmt: skip


def drawn(draw: random.Random, number: int) -> Task:
    prompt = draw.choices(range(3, 500), k=draw.randint(1, 40))
    return Task(tuple(prompt), draw.randint(1, 12), draw.choice((0, 1, -2)), number)


async def chaos(model: Any, runs: int, seed: int) -> None:
    draw, oracle, room = random.Random(seed), Oracle(), asyncio.Semaphore(AT_ONCE)
    done: Counter[str] = Counter()

    async def one(number: int) -> None:
        own = random.Random(seed * 100_003 + number)
        task = tasks[number]
        async with room:
            kind = own.choice(KINDS)
            await kind(model, task, oracle, own)
            done[kind.__name__] += 1

    tasks = [
        Task(
            tuple(draw.choices(range(3, 500), k=draw.randint(1, 40))), draw.randint(1, 12), draw.choice((0, 1, -2)), at
        )
        for at in range(runs)
    ]
    async with asyncio.TaskGroup() as group:
        for number in range(runs):
            group.create_task(one(number))
    assert sum(done.values()) == runs
    assert len(done) == len(set(KINDS))
    await drained(model)


async def test_a_hundred_runs(model: Any) -> None:
    await chaos(model, 100, 1)


@pytest.mark.soak
async def test_five_hundred_runs(model: Any) -> None:
    await chaos(model, 500, 2)


@pytest.mark.soak
def test_five_hundred_runs_on_the_v2_runner() -> None:
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-m", "soak", "-k", "test_five_hundred_runs and not v2", __file__]
    environment = {**os.environ, **v2_runner_environment()}
    ended = subprocess.run(
        pytest_, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3000, check=False
    )
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    assert re.search(r"1 passed", ended.stdout)
