"""`python -m benchmarks.turns`: host time of blocks without an engine, on a small torch model.

The parts are those of a worker (`Blocks`, the interleaver, the outbox) and of the client's receiver, fed by hand. What
is measured is CPU time of their threads, in seconds instead of minutes, and on a machine that does other things too.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import zmq

from benchmarks.blocks import probe
from benchmarks.columns import Work
from benchmarks.report import markdown
from benchmarks.stopwatch import WorkerStopwatch
from nnsight_async.capture.function import from_function
from nnsight_async.interleave.interleaver import Interleaver
from nnsight_async.interleave.order import Order
from nnsight_async.runs import frames
from nnsight_async.runs.shipment import Shipment
from nnsight_async.tree.describe import describe
from nnsight_async.tree.envoy import Envoy
from nnsight_async.tree.model import ModelView
from nnsight_async.tree.record import record
from nnsight_async.worker.adapters import Adapters
from nnsight_async.worker.blocks import Blocks
from nnsight_async.worker.composition import Composition
from nnsight_async.worker.outbox import Outbox
from nnsight_async.worker.recycling import Recycling

WIDTH = 128
LAYERS = 4
WARM = 20
WORKS: tuple[Work, ...] = ("one", "every", "edit", "python-one", "python-every", "python-edit")
PARTS = ("begin_step", "fire", "end_step", "flush", "sender: encode")


class Layer(torch.nn.Module):
    """Returns what a decoder layer of vLLM returns: new hidden states, and the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.mix(hidden), hidden + residual


class Decoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer() for _ in range(LAYERS)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        residual = torch.zeros_like(hidden)
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
        return hidden + residual


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model(hidden)


class Worker(WorkerStopwatch):
    """The parts of a worker around a model."""

    def __init__(self, address: str = "") -> None:
        self.model = Model().eval()
        calls = record(self.model, lambda: self.model(torch.zeros(1, WIDTH)))
        self.manifest = describe(self.model, repo="turns", vllm_version="", calls=calls)
        self.view = ModelView(Envoy(self.manifest))
        modules = self.manifest.modules
        entries = {path: info.entries for path, info in modules.items()}
        exits = {path: info.exits for path, info in modules.items()}
        self.address = address
        self.nnsight_outbox = Outbox(address, torch.device("cpu"))
        interleaver = Interleaver(self.model, Order(entries, exits), self.nnsight_outbox.report, self.view)
        interleaver.crews.report = self.nnsight_outbox.report_together
        recycling, adapters = Recycling(self.model, 1, 1), Adapters(SimpleNamespace())  # type: ignore[arg-type]
        self.nnsight_blocks = Blocks(interleaver, self.nnsight_outbox, torch.device("cpu"), recycling, adapters)

    def close(self) -> None:
        self.nnsight_outbox.close()
        self.nnsight_blocks.interleaver.watchdog.close()

    def arrive(self, work: Work, keys: Sequence[int]) -> list[str]:
        """Requests with these keys."""
        block = from_function(probe(self.view, work)).payload
        names = [f"{work}-{key}" for key in keys]
        new = [_request(name, key, block) for name, key in zip(names, keys, strict=True)]
        self.nnsight_blocks.schedule(_scheduled(new=new))
        return names

    def step(self, names: list[str], number: int) -> None:
        """A step in which every request has one token."""
        count = len(names)
        blocks, hidden = self.nnsight_blocks, torch.ones(count, WIDTH)
        if number:
            blocks.schedule(_scheduled(going=names))
        blocks.begin_step(Composition(names, range(count + 1), [number] * count, count))
        hidden = self.model(hidden)
        blocks.begin_sampling()
        blocks.samples(blocks.logits(hidden)[:, :1])
        blocks.end_step()

    def leave(self, names: list[str]) -> None:
        self.nnsight_blocks.schedule(_scheduled(finished=names))

    def send_to(self, address: str) -> None:
        self.address = address
        self.nnsight_outbox.mark(address, 1)


class Heard(Worker):
    """With the client's end of its socket."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.context = zmq.Context()
        self.inbox = self.context.socket(zmq.PULL)
        self.inbox.setsockopt(zmq.RCVHWM, 0)
        self.inbox.bind(address)

    def close(self) -> None:
        super().close()
        self.context.destroy(linger=0)


def _request(name: str, number: int, block: bytes) -> Any:
    params = SimpleNamespace(extra_args=None)
    Shipment((number,), block, 1 << 40, 600.0).onto(params)
    return SimpleNamespace(
        req_id=name,
        sampling_params=params,
        prompt_token_ids=[1],
        prompt_embeds=None,
        block_ids=([number],),
        num_computed_tokens=0,
        lora_request=None,
    )


def _scheduled(new: Sequence[Any] = (), going: Sequence[str] = (), finished: Sequence[str] = ()) -> Any:
    """What a scheduler says of a step."""
    cached = SimpleNamespace(
        req_ids=going,
        new_block_ids=[None] * len(going),
        num_computed_tokens=[0] * len(going),
        resumed_req_ids=(),
    )
    return SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=cached, finished_req_ids=finished)


@contextmanager
def _worker() -> Iterator[Heard]:
    with tempfile.TemporaryDirectory() as folder:
        worker = Heard(f"ipc://{folder}/inbox")
        try:
            yield worker
        finally:
            worker.close()


def measure(work: Work, requests: int, steps: int) -> dict[str, float]:
    """CPU microseconds per request and step, by part."""
    with _worker() as worker, torch.inference_mode():
        names = worker.arrive(work, range(requests))
        for number in range(WARM):
            worker.step(names, number)
            worker.inbox.recv_multipart()
        gc.collect()
        gc.freeze()  # as vLLM does when its engine is up
        worker.stopwatch_start()
        decoding = 0.0
        for number in range(WARM, WARM + steps):
            worker.step(names, number)
            decoding += _decoded(worker)
        found = worker.stopwatch_stop()
        worker.leave(names)
        gc.unfreeze()
    share = 1e6 / requests / steps
    parts = {name: found.get(name, 0.0) * share for name in PARTS}
    thread = sum(seconds for name, seconds in parts.items() if ":" not in name)
    return {"worker thread": thread, **parts, "client: decode": decoding * share}


def _decoded(worker: Heard) -> float:
    parts = [part.buffer for part in worker.inbox.recv_multipart(copy=False)]
    start = time.thread_time()
    frames.decode(parts, worker.address)
    return time.thread_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turns")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[list[str]] = []
    for work in WORKS:
        repeats = [measure(work, options.requests, options.steps) for _ in range(options.repeats)]
        least = min(repeats, key=lambda found: found["worker thread"])
        most = max(found["worker thread"] for found in repeats)
        rows.append([str(options.requests), work, *(f"{number:.1f}" for number in least.values()), f"{most:.1f}"])
    header = ["requests", "block", "worker thread", *PARTS, "client: decode", "slowest repeat"]
    print(f"CPU microseconds per request and step; the fastest of {options.repeats} repeats\n")
    print(markdown(header, rows))


if __name__ == "__main__":
    main()
